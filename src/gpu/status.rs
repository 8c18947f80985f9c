//! The word in which kernels say that a stream is malformed.

use cudarc::driver::{CudaContext, CudaStream, sys::CUdeviceptr};

use super::{Device, memory::Buffer, task::PROBLEMS};
use crate::{Error, Result};

/// A word of device memory in which decoding sets bits where a stream contradicts itself: 0 is
/// success.
///
/// Any number of decodings on any streams may share one; bits stay until [`Status::clear`].
/// Decoding itself never waits for it.
#[derive(Debug)]
pub struct Status {
    word: Buffer,
}

impl Status {
    /// A word that is 0. Allocates, and waits for the GPU.
    ///
    /// # Errors
    /// [`Error::Gpu`] if the driver refuses.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self { word: Buffer::of(device.copies(), &[0u32])? })
    }

    /// Its device address, for kernels of the caller that read it.
    pub fn device_pointer(&self) -> CUdeviceptr {
        self.word.pointer()
    }

    pub(super) fn context(&self) -> &CudaContext {
        self.word.context()
    }

    /// Its value once all that is on the stream is done, for which it waits.
    ///
    /// # Errors
    /// [`Error::Gpu`] if something on the GPU failed.
    pub fn read(&self, stream: &CudaStream) -> Result<u32> {
        let mut word = [0];
        self.word.read(stream, &mut word)?;
        Ok(word[0])
    }

    /// That no decoding so far found a malformed stream. Waits as [`Status::read`].
    ///
    /// # Errors
    /// [`Error::Corrupt`] with what was found; [`Error::Gpu`] if something on the GPU failed.
    pub fn check(&self, stream: &CudaStream) -> Result<()> {
        match self.read(stream)? {
            0 => Ok(()),
            word => Err(Error::corrupt("weights decoded on the GPU", 0, describe(word))),
        }
    }

    /// Sets it to 0 after what is on the stream, and waits.
    ///
    /// # Errors
    /// [`Error::Gpu`] if something on the GPU failed.
    pub fn clear(&self, stream: &CudaStream) -> Result<()> {
        self.word.clear(stream)
    }
}

fn describe(word: u32) -> String {
    let found: Vec<&str> =
        PROBLEMS.iter().filter(|(bit, _)| word & bit != 0).map(|&(_, text)| text).collect();
    format!("{}; `df11 verify --device cpu` says where", found.join(", "))
}

#[cfg(test)]
mod tests {
    use super::describe;

    #[test]
    fn each_bit_is_described() {
        assert_eq!(
            describe(5),
            "bits that are no code, a thread block with another number of codes than its output \
            offsets say; `df11 verify --device cpu` says where"
        );
    }
}
