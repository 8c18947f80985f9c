//! `--device`: chooses whether the CPU or a GPU decodes; the answer names it.

use std::str::FromStr;

use clap::Args;
#[cfg(feature = "cudarc")]
use df11::gpu::{Device, GpuDecoder, has_driver};
use df11::{
    Error, Model,
    hazmat::{Cpu, Decoder, is_small},
};
use serde_json::{Value, json};

use super::{
    answer::Failure,
    session::{Session, check_interrupted},
    text,
};

#[derive(Args, Clone, Copy)]
pub(super) struct DeviceArgs {
    /// Where to decode: on a GPU if that is faster (auto), the CPU (cpu), the first usable GPU
    /// (gpu), or the GPU with this number
    #[arg(long, value_name = "auto|cpu|gpu|N", default_value = "auto")]
    device: Choice,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    Auto,
    Cpu,
    /// The GPU with this number, or the first one on which the kernels run.
    Gpu(Option<usize>),
}

impl FromStr for Choice {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "gpu" => Ok(Self::Gpu(None)),
            number => match number.parse() {
                Ok(ordinal) => Ok(Self::Gpu(Some(ordinal))),
                Err(_) => Err("choose auto, cpu, gpu or a number"),
            },
        }
    }
}

/// The decoder of a model, and the device it runs on.
pub(super) struct Chosen<'m> {
    pub(super) decoder: Box<dyn Decoder + 'm>,
    pub(super) device: DecodedBy,
}

/// The device that decoded, for answers to name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DecodedBy {
    /// A GPU's number and name.
    gpu: Option<(usize, String)>,
    /// Why `auto` took the CPU.
    reason: Option<String>,
}

impl DeviceArgs {
    /// Whether it insists on a GPU.
    pub(super) const fn is_gpu(self) -> bool {
        matches!(self.device, Choice::Gpu(_))
    }

    /// Chooses the decoder of a model, on the pool that will decode; a GPU gets the model loaded.
    /// If a GPU exists but is not used, standard error says so. If `only_large`, `auto` leaves a
    /// small model to the CPU.
    pub(super) fn choose<'m>(
        self,
        model: &'m Model,
        only_large: bool,
        session: &Session,
    ) -> Result<Chosen<'m>, Failure> {
        let chosen = match self.device {
            Choice::Cpu => Chosen::cpu(None),
            Choice::Gpu(ordinal) => on_gpu(model, ordinal)?,
            Choice::Auto if only_large && is_small(model) => Chosen::cpu(Some(
                "the model is so small that the CPU is faster than starting a GPU".to_owned(),
            )),
            Choice::Auto => where_possible(model, session)?,
        };
        // Loading cannot be interrupted.
        check_interrupted()?;
        Ok(chosen)
    }
}

/// A GPU, or the CPU if no GPU can decode the model. A damaged container is an error on either.
fn where_possible<'m>(model: &'m Model, session: &Session) -> Result<Chosen<'m>, Failure> {
    match on_gpu(model, None) {
        Err(Failure::Other(
            error @ (Error::Gpu { .. } | Error::Unsupported { .. } | Error::Limit { .. }),
        )) => {
            if has_driver() {
                session.notice(&format!("the CPU decodes: {error}"));
            }
            Ok(Chosen::cpu(Some(error.to_string())))
        }
        answer => answer,
    }
}

impl Chosen<'_> {
    fn cpu(reason: Option<String>) -> Self {
        Self { decoder: Box::new(Cpu), device: DecodedBy { gpu: None, reason } }
    }
}

impl DecodedBy {
    pub(super) const fn is_gpu(&self) -> bool {
        self.gpu.is_some()
    }

    /// `CPU` or `NVIDIA H200, GPU 0`.
    pub(super) fn text(&self) -> String {
        match &self.gpu {
            Some((ordinal, name)) => format!("{}, GPU {ordinal}", text::printable(name)),
            None => "CPU".to_owned(),
        }
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "kind": if self.is_gpu() { "gpu" } else { "cpu" },
            "ordinal": self.gpu.as_ref().map(|(ordinal, _)| ordinal),
            "name": self.gpu.as_ref().map(|(_, name)| name),
            "reason": self.reason,
        })
    }
}

#[cfg(feature = "cudarc")]
fn on_gpu(model: &Model, ordinal: Option<usize>) -> Result<Chosen<'_>, Failure> {
    let device = ordinal.map_or_else(Device::first, Device::open)?;
    let decoder = Box::new(GpuDecoder::fit(model, &device)?);
    let info = device.info();
    let device = DecodedBy { gpu: Some((info.ordinal, info.name.clone())), reason: None };
    Ok(Chosen { decoder, device })
}

#[cfg(not(feature = "cudarc"))]
fn on_gpu(_: &Model, _: Option<usize>) -> Result<Chosen<'_>, Failure> {
    let remedy = "build with the feature cuda, or decode on the CPU";
    Err(Error::Gpu { problem: "this build does not use GPUs".into(), remedy: remedy.into() }.into())
}

/// Nobody expects a GPU of a build that uses none.
#[cfg(not(feature = "cudarc"))]
const fn has_driver() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::{Choice, DecodedBy};

    #[test]
    fn choices_are_words_or_numbers() {
        let choices = ["auto", "cpu", "gpu", "0", "12"].map(str::parse);
        let gpu = [None, Some(0), Some(12)].map(Choice::Gpu);
        let expected = [Choice::Auto, Choice::Cpu, gpu[0], gpu[1], gpu[2]].map(Ok);
        assert_eq!(choices, expected);
        for wrong in ["", "GPU", "cuda:0", "-1", "1.5", "99999999999999999999"] {
            assert!(wrong.parse::<Choice>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_gpu_is_told_by_number_and_name() {
        let device = DecodedBy { gpu: Some((3, "A\u{1b}B".to_owned())), reason: None };
        assert_eq!(device.text(), "A\\u{1b}B, GPU 3");
        assert_eq!((&device.json()["kind"], &device.json()["ordinal"]), (&"gpu".into(), &3.into()));
        let device = DecodedBy { gpu: None, reason: Some("none".to_owned()) };
        assert_eq!((device.text(), &device.json()["reason"]), ("CPU".to_owned(), &"none".into()));
    }
}
