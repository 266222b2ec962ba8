//! The properties CAP, VS, CC, CSTS and CRTO: enabling, resetting and shutting down a controller.

use block_io::Status;
use wire_nvme::Sqe;
use wire_nvme::fabrics::{PropertyGet, PropertySet};
use wire_nvme::registers::{
    Arbitration, CommandSets, ControllerCapabilities, ControllerConfiguration, ControllerStatus, NvmeVersion,
    SUBSYSTEM_RESET, ShutdownNotification, ShutdownStatus, offset,
};

use super::{AdminResponse, AdminResult};
use crate::limits::PAGE_LOG2;
use crate::{ControllerAssociation, ControllerLimits, INVALID_FIELD, Subsystem, SubsystemKind};

/// The version of the base specification (VS).
pub(super) const VERSION: NvmeVersion = NvmeVersion::new(2, 0, 0);

/// Longest time to enable or disable (CAP.TO): closing I/O queues waits for the I/O in flight at block
/// devices.
const READY_TIMEOUT_500MS: u8 = 30;

#[derive(Debug)]
pub(super) struct Properties {
    capabilities: ControllerCapabilities,
    configuration: ControllerConfiguration,
    status: ControllerStatus,
    kind: SubsystemKind,
}

/// The action that a write to CC or NSSR requires of the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConfigurationChange {
    None,
    Enabled,
    Reset,
    Shutdown,
    /// A Controller Level Reset of every controller of the subsystem, this one included.
    SubsystemReset,
}

impl Properties {
    pub(super) fn new(limits: &ControllerLimits, subsystem: &Subsystem) -> Properties {
        Properties {
            capabilities: ControllerCapabilities {
                queue_entries_max: limits.io_queue_entries_max,
                contiguous_queues_required: true,
                arbitration: 0,
                ready_timeout_500ms: READY_TIMEOUT_500MS,
                doorbell_stride_log2: 0,
                subsystem_reset: subsystem.subsystem_reset,
                nvm_command_set: true,
                io_command_sets: false,
                no_io_command_set: false,
                boot_partitions: false,
                page_min_log2: PAGE_LOG2,
                page_max_log2: PAGE_LOG2,
                persistent_memory: false,
                memory_buffer: false,
                subsystem_shutdown: false,
                // CRMS: Controller Ready With Media only.
                ready_modes: 1,
            },
            configuration: ControllerConfiguration::RESET,
            status: ControllerStatus::RESET,
            kind: subsystem.kind,
        }
    }

    pub(super) fn is_enabled(&self) -> bool {
        self.configuration.enable && self.status.ready
    }

    /// Sets CSTS.CFS (Controller Fatal Status).
    pub(super) fn fail(&mut self) {
        self.status.fatal = true;
        self.status.ready = false;
    }

    /// Completes a reset or shutdown in CSTS once no I/O queue is leased. The host polls CSTS, so checking on
    /// each access is enough.
    pub(super) fn update_status(&mut self, association: &ControllerAssociation) {
        let resetting = !self.configuration.enable && self.status.ready;
        let shutting_down = self.status.shutdown == ShutdownStatus::Occurring;
        if (resetting || shutting_down) && association.queues().is_empty() {
            if resetting {
                self.status = self.reset_status();
            } else {
                self.status.shutdown = ShutdownStatus::Complete;
            }
        }
    }

    /// CSTS after a reset: only a host clears NSSRO.
    fn reset_status(&self) -> ControllerStatus {
        let subsystem_reset_occurred = self.status.subsystem_reset_occurred;
        ControllerStatus { subsystem_reset_occurred, ..ControllerStatus::RESET }
    }

    /// Property Get (Base 2.0, section 6.5).
    pub(super) fn get(&self, sqe: &Sqe) -> AdminResult {
        let PropertyGet { wide, offset } = PropertyGet::from_sqe(sqe).map_err(|_| INVALID_FIELD)?;
        let value = match (offset, wide) {
            (offset::CAP, true) => self.capabilities.encode(),
            (offset::VS | offset::CC | offset::CSTS | offset::CRTO, false) => self.read(offset).into(),
            (offset::NSSR, false) if self.capabilities.subsystem_reset => self.read(offset).into(),
            _ => return Err(INVALID_FIELD),
        };
        AdminResponse::with_result(value)
    }

    /// The 32 bits at `offset`, a multiple of four; 0 for an unsupported property.
    pub(super) fn read(&self, offset: u32) -> u32 {
        const CAP_HIGH: u32 = offset::CAP + 4;
        match offset {
            offset::CAP => self.capabilities.encode() as u32,
            CAP_HIGH => (self.capabilities.encode() >> 32) as u32,
            offset::VS => VERSION.encode(),
            offset::CC => self.configuration.encode(),
            offset::CSTS => self.status.encode(),
            // CRTO.CRWMT, in the units of CAP.TO.
            offset::CRTO => READY_TIMEOUT_500MS.into(),
            _ => 0,
        }
    }

    /// Property Set (Base 2.0, section 6.6). Only CC is writable, and with NVM Subsystem Reset CSTS and NSSR.
    pub(super) fn set(
        &mut self,
        sqe: &Sqe,
        association: &ControllerAssociation,
    ) -> Result<ConfigurationChange, Status> {
        let property = PropertySet::from_sqe(sqe).map_err(|_| INVALID_FIELD)?;
        let value = property.value as u32;
        match property.offset {
            _ if property.wide => Err(INVALID_FIELD),
            offset::CC => self.write_cc(value, association),
            offset::CSTS | offset::NSSR if self.capabilities.subsystem_reset => {
                Ok(self.write_reset_register(property.offset, value))
            }
            _ => Err(INVALID_FIELD),
        }
    }

    /// Writes NSSR (Base 2.0, section 3.1.3.9), or CSTS, in which a 1 clears NSSRO. Neither has an effect
    /// without NVM Subsystem Reset.
    pub(super) fn write_reset_register(&mut self, at: u32, value: u32) -> ConfigurationChange {
        match at {
            offset::NSSR if self.capabilities.subsystem_reset && value == SUBSYSTEM_RESET => {
                return ConfigurationChange::SubsystemReset;
            }
            offset::CSTS if value & ControllerStatus::NSSRO != 0 => {
                self.status.subsystem_reset_occurred = false;
            }
            _ => {}
        }
        ConfigurationChange::None
    }

    /// An NVM Subsystem Reset: a Controller Level Reset that CSTS reports (Base 2.0, section 3.7.1).
    pub(super) fn subsystem_reset(&mut self, association: &ControllerAssociation) -> ConfigurationChange {
        self.status.subsystem_reset_occurred = true;
        let cleared = self.write_cc(ControllerConfiguration::RESET.encode(), association);
        cleared.unwrap_or(ConfigurationChange::None)
    }

    /// Writes CC.
    pub(super) fn write_cc(
        &mut self,
        value: u32,
        association: &ControllerAssociation,
    ) -> Result<ConfigurationChange, Status> {
        let requested = ControllerConfiguration::decode(value).map_err(|_| INVALID_FIELD)?;
        let previous = std::mem::replace(&mut self.configuration, requested);
        let change = match (previous.enable, requested.enable) {
            (false, true) if self.status.ready => {
                // The previous reset is not complete (Base 2.0, section 3.1.3.5: CC.EN).
                self.configuration = previous;
                return Err(Status::COMMAND_SEQUENCE_ERROR);
            }
            (false, true) if !self.supports(&requested) => {
                self.status.fatal = true;
                ConfigurationChange::None
            }
            (false, true) => {
                self.status = ControllerStatus { ready: true, ..self.reset_status() };
                ConfigurationChange::Enabled
            }
            (true, false) => {
                association.set_enabled(false);
                // CSTS.RDY stays 1 until the I/O queues are closed. A fatal error cleared it, so set it
                // again.
                self.status.ready = true;
                ConfigurationChange::Reset
            }
            _ => ConfigurationChange::None,
        };
        let shuts_down = requested.shutdown != ShutdownNotification::None
            && previous.shutdown == ShutdownNotification::None;
        let change = if shuts_down && change != ConfigurationChange::Reset {
            association.set_enabled(false);
            self.status.shutdown = ShutdownStatus::Occurring;
            ConfigurationChange::Shutdown
        } else {
            change
        };
        self.update_status(association);
        Ok(change)
    }

    /// Whether the controller supports this configuration; enabling with another one is a fatal error. Entry
    /// sizes may be 0 on a controller without I/O queues.
    fn supports(&self, requested: &ControllerConfiguration) -> bool {
        let sizes = (requested.sqe_log2, requested.cqe_log2);
        let sizes_fit = match self.kind {
            SubsystemKind::Nvm => sizes == (6, 4),
            SubsystemKind::Discovery => sizes == (6, 4) || sizes == (0, 0),
        };
        sizes_fit
            && requested.command_sets == CommandSets::Nvm
            && requested.page_log2 == PAGE_LOG2
            && requested.arbitration == Arbitration::RoundRobin
            && !requested.ready_independent_of_media
    }
}
