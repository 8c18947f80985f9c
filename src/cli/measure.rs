//! Measures time, the same way in all verbs: of work on the CPU, and of decoding on a GPU.

use std::time::Instant;

use super::{answer::Failure, session::check_interrupted, text};

/// The result of some work, and its seconds.
pub(super) fn timed<T, E>(work: impl FnOnce() -> Result<T, E>) -> Result<(T, f64), E> {
    let start = Instant::now();
    let result = work()?;
    Ok((result, start.elapsed().as_secs_f64()))
}

/// The middle sample; the mean of two if their number is even, 0 if there are none.
pub(super) fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

/// The median of several measurements, after a first one that does not count.
pub(super) fn median_of(
    times: usize,
    mut measure: impl FnMut() -> df11::Result<f64>,
) -> df11::Result<f64> {
    measure()?;
    let samples = (0..times).map(|_| measure()).collect::<df11::Result<Vec<f64>>>()?;
    Ok(median(&samples))
}

/// Seconds of all repetitions of one job with one number of threads.
#[derive(Clone)]
pub(super) struct Series {
    /// 0 on a GPU.
    pub(super) threads: usize,
    pub(super) name: String,
    /// 0 if the cost does not grow with the weights.
    pub(super) bytes: u64,
    /// The name of the job whose rate limits this one's.
    pub(super) limit: Option<&'static str>,
    pub(super) seconds: Vec<f64>,
}

impl Series {
    pub(super) fn new(name: impl Into<String>, bytes: u64, limit: Option<&'static str>) -> Self {
        Self { threads: 0, name: name.into(), bytes, limit, seconds: Vec::new() }
    }

    pub(super) fn rate(&self) -> f64 {
        text::per_second(self.bytes, median(&self.seconds))
    }
}

/// Adds the seconds of this many repetitions to their series. The first repetition does not count.
pub(super) fn repeat(
    times: u16,
    series: &mut [Series],
    mut once: impl FnMut() -> Result<Vec<f64>, Failure>,
) -> Result<(), Failure> {
    for repetition in 0..=times {
        check_interrupted()?;
        let seconds = once()?;
        if repetition > 0 {
            series.iter_mut().zip(seconds).for_each(|(series, time)| series.seconds.push(time));
        }
    }
    Ok(())
}

#[cfg(feature = "cudarc")]
pub(super) use gpu::BlockDecoder;

#[cfg(feature = "cudarc")]
mod gpu {
    use std::sync::Arc;

    use df11::{
        Error, Result,
        gpu::{
            GpuBlock, GpuModel, GpuProgram, Status,
            cudarc::driver::{CudaSlice, CudaStream},
        },
        hazmat::gpu::{seconds_between, timestamp},
    };

    /// Times that a measurement decodes everything. The last pass is timed: the GPU runs at its
    /// full clock then, and has work queued while the host launches more.
    const PASSES: usize = 5;

    /// A stream with an output for any block, and a status.
    pub(in crate::cli) struct BlockDecoder {
        stream: Arc<CudaStream>,
        status: Status,
        output: CudaSlice<u8>,
    }

    impl BlockDecoder {
        pub(in crate::cli) fn new(model: &GpuModel) -> Result<Self> {
            let device = model.devices().next().expect("a model lies on a GPU");
            let stream = device.context().new_stream()?;
            let output = stream.alloc_zeros::<u8>(model.largest_block_bytes() as usize)?;
            Ok(Self { stream, status: Status::new(device)?, output })
        }

        /// The bytes of a block.
        pub(in crate::cli) fn decode_to_host(&mut self, block: GpuBlock<'_>) -> Result<Vec<u8>> {
            block.decode_into(&mut self.output.as_view_mut(), &self.stream, &self.status)?;
            self.status.check(&self.stream)?;
            let bytes = self.output.slice(..block.layout().bytes as usize);
            self.stream.clone_dtoh(&bytes).map_err(Error::from)
        }

        /// Seconds for each block, decoded one after the other into one buffer: no block finds its
        /// own data in the cache.
        pub(in crate::cli) fn time_blocks(&mut self, model: &GpuModel) -> Result<Vec<f64>> {
            let blocks: Vec<GpuBlock<'_>> = model.blocks().collect();
            self.time(&blocks, |block, output, stream, status| {
                block.decode_into(&mut output.as_view_mut(), stream, status)
            })
        }

        /// Seconds of each program alone in a launch.
        pub(in crate::cli) fn time_programs(
            &mut self,
            programs: &[GpuProgram],
        ) -> Result<Vec<f64>> {
            self.time(programs, |program, output, stream, status| {
                program.decode_into(&mut output.as_view_mut(), stream, status)
            })
        }

        /// Seconds of each piece of work, in their last pass.
        fn time<T>(
            &mut self,
            all: &[T],
            work: impl Fn(&T, &mut CudaSlice<u8>, &CudaStream, &Status) -> Result<()>,
        ) -> Result<Vec<f64>> {
            let mut marks = Vec::new();
            for _ in 0..PASSES {
                marks.clear();
                marks.push(timestamp(&self.stream)?);
                for each in all {
                    work(each, &mut self.output, &self.stream, &self.status)?;
                    marks.push(timestamp(&self.stream)?);
                }
            }
            self.status.check(&self.stream)?;
            marks.windows(2).map(|pair| seconds_between(&pair[0], &pair[1])).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_middle_counts() {
        assert!((median(&[3.0, 1.0, 2.0]) - 2.0).abs() < f64::EPSILON);
        assert!((median(&[4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < f64::EPSILON);
        assert!(median(&[]).abs() < f64::EPSILON);
    }
}
