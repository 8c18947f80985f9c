//! The word in which kernels say that a stream is malformed.

use cudarc::driver::{CudaStream, sys::CUdeviceptr};

use super::{device::Device, fault::refuse, memory::Buffer};
use crate::{Error, Result};

/// The bits of the status word, with what they say.
const PROBLEMS: [(u32, &str); 9] = [
    (1, "bits that are no code"),
    (2, "a thread that does not end where the next one starts"),
    (4, "a thread block with another number of codes than its output offsets say"),
    (8, "output offsets that do not hold the elements asked for"),
    (16, "a lane whose codes have not as many bits as its tile's record says"),
    (32, "a tile whose lanes have not the bits between its offset and the next one"),
    (64, "a pair of one weight with two exponents"),
    (128, "a tile of the fast layout whose exceptions do not exist"),
    (256, "an index or an offset of a row that does not exist"),
];

/// A word on the device in which decoding sets bits where a stream contradicts itself; 0 is good.
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

    /// Its value once all that is on the stream is done, for which it waits.
    ///
    /// # Errors
    /// [`Error::Gpu`] if something on the GPU failed.
    pub fn read(&self, stream: &CudaStream) -> Result<u32> {
        self.word.read_word(stream)
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

/// That a stream and a status word are of a device.
pub(super) fn check_contexts(device: &Device, stream: &CudaStream, status: &Status) -> Result<()> {
    let context = device.context().cu_ctx();
    if stream.context().cu_ctx() == context && status.word.context().cu_ctx() == context {
        return Ok(());
    }
    let problem =
        "the stream or the status belongs to another device or context than what is decoded";
    refuse(problem, "make it with the context of the same device")
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
