//! Measuring time, the same way in all verbs.

use std::time::Instant;

/// The result of some work, and its seconds.
pub(super) fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let start = Instant::now();
    let result = work();
    (result, start.elapsed().as_secs_f64())
}

/// The middle sample; the mean of two where their number is even, 0 where there are none.
pub(super) fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

/// The median seconds of some work, done this many times after a first time that does not count.
pub(super) fn median_seconds(times: usize, mut work: impl FnMut()) -> f64 {
    work();
    let samples: Vec<f64> = (0..times).map(|_| timed(&mut work).1).collect();
    median(&samples)
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
