//! Typed access to controller registers, with detection of removal and invalid values.

use wire_nvme::doorbell::AdminQueueAttributes;
use wire_nvme::registers::{
    ControllerCapabilities, ControllerConfiguration, ControllerStatus, NvmeVersion, offset,
};

use crate::device::{DeviceError, NvmeDevice};
use crate::error::ControllerFailure;

/// Typed access to the registers of a device.
#[derive(Clone, Copy)]
pub(crate) struct RegisterFile<'a>(pub(crate) &'a dyn NvmeDevice);

/// Value of NSSR that starts an NVM Subsystem Reset: "NVMe" (Base 2.0, section 3.1.3.6).
const SUBSYSTEM_RESET: u32 = 0x4e56_4d65;

impl RegisterFile<'_> {
    /// Controller Capabilities (CAP).
    pub(crate) fn capabilities(&self) -> Result<ControllerCapabilities, ControllerFailure> {
        match self.0.read_u64(offset::CAP) {
            // A removed device reads as all ones, which is not a valid CAP.
            Ok(u64::MAX) => Err(ControllerFailure::Removed),
            Ok(value) => Ok(ControllerCapabilities::decode(value)),
            Err(error) => Err(failure(&error)),
        }
    }

    pub(crate) fn version(&self) -> Result<NvmeVersion, ControllerFailure> {
        Ok(NvmeVersion::decode(self.read(offset::VS)?))
    }

    pub(crate) fn configuration(&self) -> Result<ControllerConfiguration, ControllerFailure> {
        ControllerConfiguration::decode(self.read(offset::CC)?)
            .map_err(|_| ControllerFailure::InvalidResponse("CC"))
    }

    pub(crate) fn set_configuration(
        &self,
        configuration: &ControllerConfiguration,
    ) -> Result<(), ControllerFailure> {
        self.write(offset::CC, configuration.encode())
    }

    pub(crate) fn status(&self) -> Result<ControllerStatus, ControllerFailure> {
        ControllerStatus::decode(self.read(offset::CSTS)?)
            .map_err(|_| ControllerFailure::InvalidResponse("CSTS"))
    }

    /// Sets AQA, ASQ and ACQ: the addresses of the admin queues, both of `entries` entries.
    pub(crate) fn set_admin_queue(&self, entries: u32, sq: u64, cq: u64) -> Result<(), ControllerFailure> {
        let attributes = AdminQueueAttributes { submission_entries: entries, completion_entries: entries };
        self.write(offset::AQA, attributes.encode())?;
        self.0.write_u64(offset::ASQ, sq).map_err(|error| failure(&error))?;
        self.0.write_u64(offset::ACQ, cq).map_err(|error| failure(&error))
    }

    pub(crate) fn reset_subsystem(&self) -> Result<(), ControllerFailure> {
        self.write(offset::NSSR, SUBSYSTEM_RESET)
    }

    fn read(&self, at: u32) -> Result<u32, ControllerFailure> {
        match self.0.read_u32(at) {
            // A removed device reads as all ones; present controllers clear the reserved bits of these registers.
            Ok(u32::MAX) => Err(ControllerFailure::Removed),
            Ok(value) => Ok(value),
            Err(error) => Err(failure(&error)),
        }
    }

    fn write(&self, at: u32, value: u32) -> Result<(), ControllerFailure> {
        self.0.write_u32(at, value).map_err(|error| failure(&error))
    }
}

fn failure(error: &DeviceError) -> ControllerFailure {
    match error {
        DeviceError::Gone => ControllerFailure::Removed,
        _ => ControllerFailure::ResetFailed,
    }
}
