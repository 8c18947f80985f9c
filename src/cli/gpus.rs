//! `--gpus`: the memory of GPUs, which need not exist here, and the GPU on which each block would
//! be.

use std::{ops::Range, str::FromStr};

use df11::{
    Model,
    gpu::{Placement, Plan, Preference, Residence},
};
use serde_json::json;

use super::{
    answer::{Answer, Failure},
    text,
};

/// How matrices lie in a GPU's memory.
#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
pub(super) enum ResidenceArg {
    /// Compressed as in the file: least memory
    #[default]
    Stored,
    /// In the fast layout: more memory, faster products
    Fast,
    /// In the fast layout as far as memory allows
    Auto,
}

impl From<ResidenceArg> for Preference {
    fn from(residence: ResidenceArg) -> Self {
        match residence {
            ResidenceArg::Stored => Self::Stored,
            ResidenceArg::Fast => Self::Fast,
            ResidenceArg::Auto => Self::Auto,
        }
    }
}

/// Bytes of memory of each GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Gpus(Vec<u64>);

const FORM: &str = "write 80GiB, 8x80GiB, or 24GiB,2x16GB (1 GB is 10^9 bytes, 1 GiB 2^30)";
/// More GPUs are a mistake.
const MAX_GPUS: usize = 1024;

impl FromStr for Gpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut memory = Vec::new();
        for part in text.split(',') {
            let (count, size) = part.split_once(['x', 'X', '×']).unwrap_or(("1", part));
            let count: usize = count.trim().parse().map_err(|_| FORM.to_owned())?;
            if count == 0 || memory.len() + count > MAX_GPUS {
                return Err(format!("name 1 to {MAX_GPUS} GPUs"));
            }
            memory.resize(memory.len() + count, bytes(size.trim()).ok_or(FORM)?);
        }
        Ok(Self(memory))
    }
}

/// `80GB`, `79.5 GiB`, `500MB`: decimal and binary units, as everywhere. A number without a unit
/// is refused: people mean gigabytes.
#[expect(clippy::cast_sign_loss, reason = "no sign is read")]
fn bytes(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let scale = match text[end..].trim_start().to_ascii_uppercase().as_str() {
        "B" => 1,
        "MB" | "M" => 1_000_000,
        "GB" | "G" => 1_000_000_000,
        "TB" | "T" => 1_000_000_000_000u64,
        "MIB" => 1 << 20,
        "GIB" => 1 << 30,
        "TIB" => 1 << 40,
        _ => return None,
    };
    let number: f64 = text[..end].parse().ok()?;
    Some((number * scale as f64) as u64)
}

impl Gpus {
    /// Adds to an answer where the blocks of a model would lie.
    pub(super) fn place(
        &self,
        model: &Model,
        preference: Preference,
        answer: &mut Answer,
    ) -> Result<(), Failure> {
        let plan = Plan::fit_preferring(model, &self.0, preference)?;
        let names: Vec<&str> = model.blocks().map(|block| block.name()).collect();
        let header = ["GPU", "memory", "used", "blocks", "fast", "streamed", "first", "last"];
        let (mut rows, mut gpus) = (Vec::new(), Vec::new());
        for (device, (&memory, &taken)) in self.0.iter().zip(plan.device_bytes()).enumerate() {
            let blocks = run(plan.placements(), device);
            let those = |are: &dyn Fn(usize) -> bool| -> Vec<&str> {
                blocks.clone().filter(|&at| are(at)).map(|at| names[at]).collect()
            };
            let fast = those(&|at| plan.residences()[at] == Residence::Fast);
            let streamed = those(&|at| plan.placements()[at].is_some_and(|place| place.streamed));
            let name = |at: Option<usize>| at.map_or("", |at| names[at]);
            let (first, last) = (name(blocks.clone().next()), name(blocks.clone().last()));
            rows.push([
                device.to_string(),
                text::bytes(memory),
                text::bytes(taken),
                blocks.len().to_string(),
                fast.len().to_string(),
                streamed.len().to_string(),
                text::printable(first),
                text::printable(last),
            ]);
            gpus.push(json!({
                "gpu": device, "memory_bytes": memory, "taken_bytes": taken,
                "blocks": names[blocks.clone()],
                "fast": fast,
                "streamed": streamed,
            }));
        }
        let fits = plan.host_bytes() == 0;
        let verdict = if fits {
            "It fits: all blocks stay in GPU memory.".to_owned()
        } else {
            format!(
                "It does not fit: {} stay in pinned host memory and are copied before each use.",
                text::bytes(plan.host_bytes())
            )
        };
        answer.text = format!(
            "{}\n{verdict} The memory used includes two decoded blocks; activations and the KV \
            cache need more.\n{}",
            answer.text,
            text::table(header, rows)
        );
        answer.json["placement"] =
            json!({ "fits": fits, "host_bytes": plan.host_bytes(), "gpus": gpus });
        Ok(())
    }
}

/// The blocks of a GPU; a plan that fits a whole model gives each one run.
fn run(placements: &[Option<Placement>], device: usize) -> Range<usize> {
    let start =
        placements.partition_point(|place| place.is_some_and(|place| place.device < device));
    let end = placements.partition_point(|place| place.is_some_and(|place| place.device <= device));
    start..end
}

#[cfg(test)]
mod tests {
    use super::Gpus;

    #[test]
    fn memory_is_read_as_people_write_it() {
        let read = |text: &str| text.parse::<Gpus>().map(|gpus| gpus.0);
        assert_eq!(read("8x80GB"), Ok(vec![80_000_000_000; 8]));
        assert_eq!(read("24GiB, 2×16 gb"), Ok(vec![24 << 30, 16_000_000_000, 16_000_000_000]));
        assert_eq!(read("1.5MiB,500B,1.5MB"), Ok(vec![3 << 19, 500, 1_500_000]));
        for bad in ["", "80", "x80GB", "0x80GB", "80KB", "-1GB", "8x", "2000x80GB", "1..5GB"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
