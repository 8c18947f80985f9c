//! Errors: those of the driver, with their remedies, and those of refused arguments.

use std::fmt::Display;

use cudarc::driver::{DriverError, sys::CUresult};

use crate::{Error, Result};

/// Turns answers of the driver into errors that say what was being done.
pub(super) trait OrFault<T> {
    /// [`Error::Gpu`] with the remedy that fits the driver's answer.
    fn or_fault(self, action: &str) -> Result<T, Error>;
}

impl<T> OrFault<T> for Result<T, DriverError> {
    fn or_fault(self, action: &str) -> Result<T, Error> {
        self.map_err(|error| fault(action, error))
    }
}

/// Also converts errors of [`cudarc`] that the caller's own calls return.
impl From<DriverError> for Error {
    fn from(error: DriverError) -> Self {
        fault("using the GPU", error)
    }
}

fn fault(action: &str, error: DriverError) -> Error {
    let answer = match (error.error_string(), error.error_name()) {
        (Ok(text), Ok(name)) => format!("{} ({})", text.to_string_lossy(), name.to_string_lossy()),
        _ => format!("CUDA error {}", error.0 as u32),
    };
    gpu(format!("{action}: {answer}"), remedy(error.0))
}

/// Makes an [`Error::Gpu`].
pub(super) fn gpu(problem: impl Into<String>, remedy: impl Into<String>) -> Error {
    Error::Gpu { problem: problem.into(), remedy: remedy.into() }
}

/// Returns an [`Error::Parameter`] from a check.
pub(super) fn refuse<T>(problem: impl Display, remedy: impl Display) -> Result<T> {
    Err(Error::parameter(problem, remedy))
}

/// Remedy for a GPU that the kernels are not compiled for.
pub(super) const ANOTHER_GPU: &str = "decode on the CPU, or on a GPU of 8.0 (Ampere) or newer";
/// Remedy for a driver that cannot load the kernels.
pub(super) const NEWER_DRIVER: &str = "install a driver of CUDA 12.0 (R525) or newer";

/// The user's remedy for an answer of the driver; the last one is for answers that nobody expects.
fn remedy(answer: CUresult) -> &'static str {
    use CUresult as Is;
    match answer {
        Is::CUDA_ERROR_OUT_OF_MEMORY => {
            "free memory on the GPU, or take a smaller model or another GPU"
        }
        Is::CUDA_ERROR_NO_DEVICE | Is::CUDA_ERROR_INVALID_DEVICE => {
            "check nvidia-smi and CUDA_VISIBLE_DEVICES"
        }
        Is::CUDA_ERROR_DEVICE_UNAVAILABLE => {
            "another process has the GPU for itself, or its compute mode (nvidia-smi -q -d \
            COMPUTE) forbids use; wait, or change the mode"
        }
        Is::CUDA_ERROR_NOT_INITIALIZED => {
            "start the driver in the process that uses it, not before a fork"
        }
        Is::CUDA_ERROR_STUB_LIBRARY => {
            "this library only serves to link programs; take the CUDA toolkit's folder of stubs \
            out of LD_LIBRARY_PATH"
        }
        Is::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH | Is::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => {
            "the driver's library does not fit its kernel module; restart the machine after an \
            update of the driver, and take folders of cuda-compat out of LD_LIBRARY_PATH"
        }
        Is::CUDA_ERROR_SYSTEM_NOT_READY => {
            "start the driver's services; machines with NVSwitch need nvidia-fabricmanager"
        }
        Is::CUDA_ERROR_MPS_CONNECTION_FAILED
        | Is::CUDA_ERROR_MPS_RPC_FAILURE
        | Is::CUDA_ERROR_MPS_SERVER_NOT_READY
        | Is::CUDA_ERROR_MPS_MAX_CLIENTS_REACHED
        | Is::CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED
        | Is::CUDA_ERROR_MPS_CLIENT_TERMINATED => {
            "look into the log of the MPS server, and start it again"
        }
        Is::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => NEWER_DRIVER,
        Is::CUDA_ERROR_JIT_COMPILER_NOT_FOUND => {
            "install all of the driver: the library libnvidia-ptxjitcompiler is missing"
        }
        Is::CUDA_ERROR_JIT_COMPILATION_DISABLED => {
            "unset CUDA_DISABLE_PTX_JIT and CUDA_DISABLE_JIT"
        }
        Is::CUDA_ERROR_NO_BINARY_FOR_GPU => ANOTHER_GPU,
        Is::CUDA_ERROR_ECC_UNCORRECTABLE | Is::CUDA_ERROR_NVLINK_UNCORRECTABLE => {
            "the hardware failed; reset the GPU or restart the machine, and replace it if this \
            comes again"
        }
        // These answers end a context, which the whole process shares.
        Is::CUDA_ERROR_ILLEGAL_ADDRESS
        | Is::CUDA_ERROR_LAUNCH_TIMEOUT
        | Is::CUDA_ERROR_ASSERT
        | Is::CUDA_ERROR_HARDWARE_STACK_ERROR
        | Is::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | Is::CUDA_ERROR_MISALIGNED_ADDRESS
        | Is::CUDA_ERROR_INVALID_ADDRESS_SPACE
        | Is::CUDA_ERROR_INVALID_PC
        | Is::CUDA_ERROR_LAUNCH_FAILED => {
            "some kernel of this process failed, and the GPU takes nothing more from it; start it \
            again"
        }
        Is::CUDA_ERROR_OPERATING_SYSTEM | Is::CUDA_ERROR_UNKNOWN => {
            "check nvidia-smi and that you may use /dev/nvidia*; load the kernel module nvidia_uvm \
            again (it may not survive sleep), or restart the machine"
        }
        _ => "check nvidia-smi and the system's log for faults of the GPU",
    }
}

#[cfg(test)]
mod tests {
    use super::{CUresult as Is, remedy};

    #[test]
    fn each_answer_has_the_remedy_that_fits() {
        for (answer, words) in [
            (Is::CUDA_ERROR_OUT_OF_MEMORY, "free memory"),
            (Is::CUDA_ERROR_NO_DEVICE, "CUDA_VISIBLE_DEVICES"),
            (Is::CUDA_ERROR_INVALID_DEVICE, "CUDA_VISIBLE_DEVICES"),
            (Is::CUDA_ERROR_DEVICE_UNAVAILABLE, "compute mode"),
            (Is::CUDA_ERROR_NOT_INITIALIZED, "fork"),
            (Is::CUDA_ERROR_STUB_LIBRARY, "stubs"),
            (Is::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "restart the machine"),
            (Is::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, "cuda-compat"),
            (Is::CUDA_ERROR_SYSTEM_NOT_READY, "nvidia-fabricmanager"),
            (Is::CUDA_ERROR_MPS_CONNECTION_FAILED, "MPS"),
            (Is::CUDA_ERROR_MPS_CLIENT_TERMINATED, "MPS"),
            (Is::CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "driver of CUDA 12.0"),
            (Is::CUDA_ERROR_JIT_COMPILER_NOT_FOUND, "libnvidia-ptxjitcompiler"),
            (Is::CUDA_ERROR_JIT_COMPILATION_DISABLED, "unset CUDA_DISABLE_PTX_JIT"),
            (Is::CUDA_ERROR_NO_BINARY_FOR_GPU, "8.0"),
            (Is::CUDA_ERROR_ECC_UNCORRECTABLE, "reset the GPU"),
            (Is::CUDA_ERROR_NVLINK_UNCORRECTABLE, "hardware"),
            (Is::CUDA_ERROR_ILLEGAL_ADDRESS, "start it again"),
            (Is::CUDA_ERROR_LAUNCH_FAILED, "start it again"),
            (Is::CUDA_ERROR_OPERATING_SYSTEM, "/dev/nvidia"),
            (Is::CUDA_ERROR_UNKNOWN, "nvidia_uvm"),
            (Is::CUDA_ERROR_NOT_SUPPORTED, "the system's log"),
        ] {
            let remedy = remedy(answer);
            assert!(remedy.contains(words), "{answer:?}: {remedy}");
            assert!(
                !remedy.contains('\n') && !remedy.contains("  ") && !remedy.ends_with('.'),
                "{remedy}"
            );
        }
    }
}
