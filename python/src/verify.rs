//! Verification, and what decodes for it.

use std::path::PathBuf;

use df11::{
    Error, Level, Model, Observer, Verification,
    gpu::{Device, GpuDecoder},
    hazmat::{Cpu, Decoder, is_small},
};
use pyo3::{intern, prelude::*, types::PyTuple};

use crate::{
    work::{self, unknown_word},
    write::open_to_stream,
};

/// The argument `device`.
#[derive(FromPyObject)]
pub(crate) enum DeviceChoice {
    Number(usize),
    Word(String),
}

/// How a model is verified.
pub(crate) struct Check {
    level: Level,
    device: DeviceChoice,
}

/// Checks a container, or all models in a folder.
#[pyfunction]
#[pyo3(signature = (path, level="full", *, device=None, progress=None))]
pub(crate) fn verify<'py>(
    py: Python<'py>,
    path: PathBuf,
    level: &str,
    device: Option<DeviceChoice>,
    progress: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    Check::new(py, level, device)?.watched(py, progress, |check, observer| {
        let models = open_to_stream(&path)?;
        let mut all = Verification::default();
        for component in models.components() {
            let found = check.run(&component.model, observer)?;
            all.tensors += found.tensors;
            all.files += found.files;
            all.bytes = all.bytes.saturating_add(found.bytes);
            all.unchecked.extend(found.unchecked.iter().map(|what| component.sentence(what)));
        }
        all.unchecked.extend(
            models.missing().iter().map(|name| format!("component {name}, which is missing")),
        );
        Ok(all)
    })
}

impl Check {
    pub(crate) fn new(py: Python<'_>, level: &str, device: Option<DeviceChoice>) -> PyResult<Self> {
        let level = match level {
            "structure" => Level::Structure,
            "checksums" => Level::Checksums,
            "full" => Level::Full,
            _ => {
                let levels = "structure, checksums or full";
                return Err(unknown_word(py, "the level", level, levels));
            }
        };
        let device = device.unwrap_or_else(|| DeviceChoice::Word("auto".to_owned()));
        match &device {
            DeviceChoice::Word(word) if !["auto", "cpu", "gpu"].contains(&word.as_str()) => {
                let devices = "auto, cpu, gpu or the number of a GPU";
                Err(unknown_word(py, "the device", word, devices))
            }
            _ => Ok(Self { level, device }),
        }
    }

    /// Verifies, and tells Python what was found.
    pub(crate) fn watched<'py>(
        &self,
        py: Python<'py>,
        progress: Option<&Bound<'py, PyAny>>,
        verify: impl FnOnce(&Self, &dyn Observer) -> df11::Result<Verification> + Send,
    ) -> PyResult<Bound<'py, PyAny>> {
        let found = work::watched(py, progress, |observer| verify(self, observer))?;
        let class = py.import(intern!(py, "df11._report"))?.getattr("Verification")?;
        class.call1((found.tensors, found.files, found.bytes, PyTuple::new(py, &found.unchecked)?))
    }

    pub(crate) fn run(&self, model: &Model, observer: &dyn Observer) -> df11::Result<Verification> {
        if self.level < Level::Full {
            return model.verify(self.level, observer);
        }
        model.verify_with(self.level, &*self.decoder(model)?, observer)
    }

    /// A decoder for a model, which a GPU has loaded when this returns.
    fn decoder<'m>(&self, model: &'m Model) -> df11::Result<Box<dyn Decoder + 'm>> {
        let on = |device: df11::Result<Device>| -> df11::Result<Box<dyn Decoder + 'm>> {
            Ok(Box::new(GpuDecoder::fit(model, &device?)?))
        };
        let word = match &self.device {
            DeviceChoice::Number(ordinal) => return on(Device::open(*ordinal)),
            DeviceChoice::Word(word) => word.as_str(),
        };
        if word == "cpu" || word == "auto" && is_small(model) {
            return Ok(Box::new(Cpu));
        }
        match on(Device::first()) {
            // What is wrong with the container is wrong on either.
            Err(Error::Gpu { .. } | Error::Unsupported { .. } | Error::Limit { .. })
                if word == "auto" =>
            {
                Ok(Box::new(Cpu))
            }
            answer => answer,
        }
    }
}
