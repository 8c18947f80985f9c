//! The status word, in which kernels report malformed streams. It is in pinned host memory, where
//! reading it needs neither a copy nor a wait.

use cudarc::driver::{CudaStream, sys::CUdeviceptr};

use super::{device::Device, fault::OrFault, fault::refuse, pinned::HostWord};
use crate::{Error, Result};

/// The bits of the status word and their meanings.
const PROBLEMS: [(u32, &str); 9] = [
    (1, "bits that are not a code"),
    (2, "a thread that does not end where the next one starts"),
    (4, "a thread block with another number of codes than its output offsets say"),
    (8, "output offsets that do not hold the elements asked for"),
    (16, "a lane whose codes have another number of bits than its tile's record says"),
    (32, "a tile whose lanes do not fill the bits between its offset and the next one"),
    (64, "a pair of one weight with two exponents"),
    (128, "a tile of the fast layout whose exceptions do not exist"),
    (INDEX, "an index or an offset of a row that does not exist"),
];
/// The bit that a call's arguments set, never stored data.
const INDEX: u32 = 256;

/// A word in which kernels on a device set bits if a stream contradicts itself; 0 means that all is
/// well.
///
/// It is in pinned host memory, and kernels write it over the bus only if they find a problem. So
/// the host can read it at any time ([`Status::check_done`]) without a copy and without waiting,
/// even while CUDA graphs are captured or replayed.
///
/// Any number of decodings on any streams may share one; bits stay until [`Status::clear`] or
/// [`Status::check_done`]. Decoding itself never waits for it.
#[derive(Debug)]
pub struct Status {
    word: HostWord,
}

impl Status {
    /// Makes a word that is 0. Allocates, and pins a page of the host.
    ///
    /// # Errors
    /// [`Error::Gpu`] if the driver refuses.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self { word: HostWord::new(device.context())? })
    }

    /// Its device address, for kernels of the caller that read it.
    pub fn device_pointer(&self) -> CUdeviceptr {
        self.word.pointer()
    }

    /// Waits for all work on the stream and returns the word's value.
    ///
    /// # Errors
    /// [`Error::Gpu`] if something on the GPU failed.
    pub fn read(&self, stream: &CudaStream) -> Result<u32> {
        stream.synchronize().or_fault("waiting for the GPU")?;
        Ok(self.word.load())
    }

    /// Checks that no decoding so far found a malformed stream or was given an index out of range.
    /// Waits like [`Status::read`].
    ///
    /// # Errors
    /// [`Error::Corrupt`] with the problems found; [`Error::Parameter`] if these are only indices
    /// or offsets of rows that do not exist; [`Error::Gpu`] if something on the GPU failed.
    pub fn check(&self, stream: &CudaStream) -> Result<()> {
        judge(self.read(stream)?)
    }

    /// Checks, like [`Status::check`], the kernels that have finished: does not wait, and takes
    /// nanoseconds. Reports each problem once.
    ///
    /// # Errors
    /// [`Error::Corrupt`] and [`Error::Parameter`], same as [`Status::check`].
    pub fn check_done(&self) -> Result<()> {
        judge(self.word.take())
    }

    /// Sets it to 0 after earlier work on the stream, and waits.
    ///
    /// # Errors
    /// [`Error::Gpu`] if something on the GPU failed.
    pub fn clear(&self, stream: &CudaStream) -> Result<()> {
        self.read(stream)?;
        self.word.take();
        Ok(())
    }
}

/// Checks that a stream and a status word belong to a device.
pub(super) fn check_contexts(device: &Device, stream: &CudaStream, status: &Status) -> Result<()> {
    let context = device.context().cu_ctx();
    if stream.context().cu_ctx() == context && status.word.context().cu_ctx() == context {
        return Ok(());
    }
    let problem =
        "the stream or the status belongs to another device or context than what is decoded";
    refuse(problem, "make it with the context of the same device")
}

fn judge(word: u32) -> Result<()> {
    match word {
        0 => Ok(()),
        INDEX => {
            let problem = "a GPU was given an index or an offset of a row that does not exist";
            Err(Error::parameter(problem, "pass numbers of rows that the weights have"))
        }
        _ => Err(Error::corrupt("weights decoded on the GPU", 0, describe(word))),
    }
}

fn describe(word: u32) -> String {
    let found: Vec<&str> =
        PROBLEMS.iter().filter(|(bit, _)| word & bit != 0).map(|&(_, text)| text).collect();
    format!("{}; `df11 verify --device cpu` says where", found.join(", "))
}

#[cfg(test)]
mod tests {
    use super::{INDEX, describe, judge};
    use crate::Error;

    #[test]
    fn each_bit_is_described() {
        assert_eq!(
            describe(5),
            "bits that are not a code, a thread block with another number of codes than its output \
            offsets say; `df11 verify --device cpu` says where"
        );
    }

    #[test]
    fn indices_are_the_callers_fault_and_all_else_the_weights() {
        assert!(judge(0).is_ok());
        assert!(matches!(judge(INDEX), Err(Error::Parameter { .. })));
        for word in [1, 128, INDEX | 16] {
            assert!(matches!(judge(word), Err(Error::Corrupt { .. })));
        }
    }
}
