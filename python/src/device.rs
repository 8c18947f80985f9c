//! What decodes for verification.

use df11::{
    Error, Model,
    gpu::{Device, GpuDecoder},
    hazmat::{Cpu, Decoder, is_small},
};
use pyo3::prelude::*;

use crate::error::unknown_word;

/// The argument `device`.
#[derive(Clone, Copy)]
pub(crate) enum Choice {
    Auto,
    Cpu,
    Gpu,
    Number(usize),
}

#[derive(FromPyObject)]
pub(crate) enum Argument {
    Number(usize),
    Word(String),
}

impl Choice {
    pub(crate) fn new(py: Python<'_>, argument: &Argument) -> PyResult<Self> {
        match argument {
            Argument::Number(ordinal) => Ok(Self::Number(*ordinal)),
            Argument::Word(word) => match word.as_str() {
                "auto" => Ok(Self::Auto),
                "cpu" => Ok(Self::Cpu),
                "gpu" => Ok(Self::Gpu),
                word => Err(unknown_word(
                    py,
                    "the device",
                    word,
                    "auto, cpu, gpu or the number of a GPU",
                )),
            },
        }
    }

    /// A decoder for a model, which a GPU has loaded when this returns.
    pub(crate) fn decoder(self, model: &Model) -> df11::Result<Box<dyn Decoder + '_>> {
        let on = |device: df11::Result<Device>| -> df11::Result<Box<dyn Decoder + '_>> {
            Ok(Box::new(GpuDecoder::fit(model, &device?)?))
        };
        match self {
            Self::Cpu => Ok(Box::new(Cpu)),
            Self::Gpu => on(Device::first()),
            Self::Number(ordinal) => on(Device::open(ordinal)),
            Self::Auto if is_small(model) => Ok(Box::new(Cpu)),
            // What is wrong with the container is wrong on either.
            Self::Auto => match on(Device::first()) {
                Err(Error::Gpu { .. } | Error::Unsupported { .. } | Error::Limit { .. }) => {
                    Ok(Box::new(Cpu))
                }
                answer => answer,
            },
        }
    }
}
