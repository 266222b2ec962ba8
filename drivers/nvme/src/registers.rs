//! The controller's registers, typed, and what can be wrong with them.

use wire_nvme::doorbell::AdminQueueAttributes;
use wire_nvme::registers::{Capabilities, Configuration, ControllerStatus, Version, offset};

use crate::device::{Device, DeviceError};
use crate::error::Failure;

/// Typed access to the registers of a device.
#[derive(Clone, Copy)]
pub(crate) struct RegisterFile<'a>(pub(crate) &'a dyn Device);

/// What NSSR wants to see: "NVMe" (Base 2.0, section 3.1.3.6).
const SUBSYSTEM_RESET: u32 = 0x4e56_4d65;

impl RegisterFile<'_> {
    /// Controller capabilities.
    pub(crate) fn capabilities(&self) -> Result<Capabilities, Failure> {
        match self.0.read_u64(offset::CAP) {
            // No controller has all of it; a device that is gone reads like this.
            Ok(u64::MAX) => Err(Failure::Removed),
            Ok(value) => Ok(Capabilities::decode(value)),
            Err(error) => Err(failure(&error)),
        }
    }

    pub(crate) fn version(&self) -> Result<Version, Failure> {
        Ok(Version::decode(self.read(offset::VS)?))
    }

    pub(crate) fn configuration(&self) -> Result<Configuration, Failure> {
        Configuration::decode(self.read(offset::CC)?).map_err(|_| Failure::Answer("CC"))
    }

    pub(crate) fn set_configuration(&self, configuration: &Configuration) -> Result<(), Failure> {
        self.write(offset::CC, configuration.encode())
    }

    pub(crate) fn status(&self) -> Result<ControllerStatus, Failure> {
        ControllerStatus::decode(self.read(offset::CSTS)?).map_err(|_| Failure::Answer("CSTS"))
    }

    /// Where the admin queue lies, both rings of `entries` entries.
    pub(crate) fn set_admin_queue(&self, entries: u32, sq: u64, cq: u64) -> Result<(), Failure> {
        let attributes = AdminQueueAttributes { submission_entries: entries, completion_entries: entries };
        self.write(offset::AQA, attributes.encode())?;
        self.0.write_u64(offset::ASQ, sq).map_err(|error| failure(&error))?;
        self.0.write_u64(offset::ACQ, cq).map_err(|error| failure(&error))
    }

    pub(crate) fn reset_subsystem(&self) -> Result<(), Failure> {
        self.write(offset::NSSR, SUBSYSTEM_RESET)
    }

    fn read(&self, at: u32) -> Result<u32, Failure> {
        match self.0.read_u32(at) {
            // Reserved bits of all of these are zero in every controller that is there.
            Ok(u32::MAX) => Err(Failure::Removed),
            Ok(value) => Ok(value),
            Err(error) => Err(failure(&error)),
        }
    }

    fn write(&self, at: u32, value: u32) -> Result<(), Failure> {
        self.0.write_u32(at, value).map_err(|error| failure(&error))
    }
}

fn failure(error: &DeviceError) -> Failure {
    match error {
        DeviceError::Gone => Failure::Removed,
        _ => Failure::ResetFailed,
    }
}
