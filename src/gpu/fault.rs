//! The driver's answers as errors of this crate.

use cudarc::driver::{DriverError, sys::CUresult};

use crate::Error;

/// Answers of the driver, with what was being done.
pub(super) trait OrFault<T> {
    /// [`Error::Gpu`] with the remedy that fits the driver's answer.
    fn or_fault(self, action: &str) -> Result<T, Error>;
}

impl<T> OrFault<T> for Result<T, DriverError> {
    fn or_fault(self, action: &str) -> Result<T, Error> {
        self.map_err(|error| {
            let answer = error
                .error_string()
                .map_or_else(|_| format!("{:?}", error.0), |text| text.to_string_lossy().into_owned());
            gpu(format!("{action}: {answer}"), remedy(error.0))
        })
    }
}

/// An [`Error::Gpu`].
pub(super) fn gpu(problem: impl Into<String>, remedy: impl Into<String>) -> Error {
    Error::Gpu { problem: problem.into(), remedy: remedy.into() }
}

fn remedy(answer: CUresult) -> &'static str {
    match answer {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            "free memory on the GPU, or take a smaller model or another GPU"
        }
        CUresult::CUDA_ERROR_NO_DEVICE | CUresult::CUDA_ERROR_INVALID_DEVICE => {
            "check nvidia-smi and CUDA_VISIBLE_DEVICES"
        }
        CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION | CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
            "install an NVIDIA driver of CUDA 12.0 (R525) or newer"
        }
        CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => "another process has the GPU for itself; wait or stop it",
        _ => "check nvidia-smi and the system's log for faults of the GPU",
    }
}
