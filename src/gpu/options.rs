//! `OpenOptions::device`: opening and loading in one call.

use std::path::Path;

use super::{Device, GpuModel, LoadOptions};
use crate::{OpenOptions, Result};

/// How a model is opened and loaded onto GPUs. From [`OpenOptions::device`].
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    open: OpenOptions,
    devices: Vec<Device>,
    load: LoadOptions,
}

impl OpenOptions {
    /// To open a model and load it onto a GPU in one call.
    #[must_use]
    pub fn device(self, device: &Device) -> DeviceOptions {
        DeviceOptions { open: self, devices: vec![device.clone()], load: LoadOptions::new() }
    }
}

impl DeviceOptions {
    /// One more GPU, for a model that is spread over several.
    #[must_use]
    pub fn device(mut self, device: &Device) -> Self {
        self.devices.push(device.clone());
        self
    }

    /// How it is loaded.
    #[must_use]
    pub fn load(mut self, load: LoadOptions) -> Self {
        self.load = load;
        self
    }

    /// Opens a container, or a folder with all its shards, and loads it: [`OpenOptions::open`], then
    /// [`Model::load_on`](crate::Model::load_on).
    ///
    /// # Errors
    /// As those two.
    pub fn open(&self, path: impl AsRef<Path>) -> Result<GpuModel> {
        self.open.open(path)?.load_on(&self.devices, &self.load)
    }
}
