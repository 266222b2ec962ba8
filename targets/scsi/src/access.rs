//! Whether a nexus may execute a command now.

use reservations::access;
use wire_scsi::{AdditionalSense, Cdb, CdbError, ScsiStatus, Sense};

use crate::nexus::UnitNexus;
use crate::ports::check_state;
use crate::response::{Failure, check};
use crate::sanitize::check_sanitize;

/// Checks what precedes every command: unit attentions, the CDB, the port's access state, a sanitize operation,
/// reservations.
#[inline]
pub(crate) fn check_access(nexus: &UnitNexus, cdb: Result<Cdb, CdbError>) -> Result<Cdb, Failure> {
    // SAM-5, section 5.14.3: these three report unit attentions in their own way.
    let is_exempt =
        matches!(cdb, Ok(Cdb::Inquiry { .. } | Cdb::ReportLuns { .. } | Cdb::RequestSense { .. }));
    if !is_exempt && let Some(attention) = nexus.take_attention() {
        return Err(check(Sense::attention(attention)));
    }
    let cdb = cdb.map_err(|error| check(error.sense()))?;
    check_state(nexus.access(), &cdb)?;
    check_sanitize(nexus.unit(), &cdb)?;
    let is_unreserved = is_exempt || matches!(cdb, Cdb::Release { .. });
    if !is_unreserved && nexus.unit().is_reserved_by_other(nexus) || nexus.is_denied(class(&cdb)) {
        return Err((ScsiStatus::ReservationConflict, None));
    }
    Ok(cdb)
}

/// What a persistent reservation of another nexus forbids (SPC-4, table 63; SBC-4, table 13): bits of [`access`].
#[inline]
fn class(cdb: &Cdb) -> u8 {
    match cdb {
        Cdb::Read(_)
        | Cdb::Verify { .. }
        | Cdb::PreFetch(_)
        | Cdb::GetLbaStatus { .. }
        | Cdb::ModeSense { .. }
        | Cdb::ReadDefectData { .. }
        | Cdb::ReceiveCopyResults { .. } => access::READ,
        Cdb::Write(_)
        | Cdb::WriteAndVerify { .. }
        | Cdb::OrWrite(_)
        | Cdb::CompareAndWrite(_)
        | Cdb::WriteAtomic { .. }
        | Cdb::WriteSame(_)
        | Cdb::Unmap { .. }
        | Cdb::SynchronizeCache(_)
        | Cdb::ModeSelect { .. }
        | Cdb::Sanitize { .. }
        | Cdb::ExtendedCopy { .. }
        | Cdb::SetTargetPortGroups { .. } => access::WRITE,
        // Starting a unit is allowed, and so is allowing removal.
        Cdb::StartStopUnit { start: true, power_condition: 0, .. } => 0,
        Cdb::StartStopUnit { .. } => access::WRITE,
        Cdb::PreventAllowMediumRemoval { prevent: 0 } => 0,
        Cdb::PreventAllowMediumRemoval { .. } => access::WRITE,
        // Reservation commands have rules of their own.
        Cdb::Reserve { .. }
        | Cdb::Release { .. }
        | Cdb::PersistentReserveIn { .. }
        | Cdb::PersistentReserveOut { .. } => 0,
        Cdb::TestUnitReady
        | Cdb::RequestSense { .. }
        | Cdb::Inquiry { .. }
        | Cdb::ReadCapacity10 { .. }
        | Cdb::ReadCapacity16 { .. }
        | Cdb::ReportLuns { .. }
        | Cdb::ReportTargetPortGroups { .. }
        | Cdb::ReportSupportedOpcodes { .. }
        | Cdb::ReportSupportedFunctions { .. } => 0,
    }
}

/// Checks that a copy may read the unit's blocks, or write them: a command to another unit of the session does.
pub(crate) fn check_copy(nexus: &UnitNexus, writes: bool) -> Result<(), Failure> {
    let range = wire_scsi::BlockRange::default();
    let cdb = if writes { Cdb::Write(range) } else { Cdb::Read(range) };
    check_state(nexus.access(), &cdb)?;
    check_sanitize(nexus.unit(), &cdb)?;
    if nexus.unit().is_reserved_by_other(nexus) || nexus.is_denied(class(&cdb)) {
        return Err((ScsiStatus::ReservationConflict, None));
    }
    if writes { check_writable(nexus) } else { Ok(()) }
}

/// Whether the unit can be written.
#[inline]
pub(crate) fn check_writable(nexus: &UnitNexus) -> Result<(), Failure> {
    let unit = nexus.unit();
    let additional = if unit.config().read_only {
        AdditionalSense::WRITE_PROTECTED
    } else if unit.is_software_protected() {
        AdditionalSense::SOFTWARE_WRITE_PROTECTED
    } else {
        return Ok(());
    };
    Err(check(Sense::new(wire_scsi::SenseKey::DataProtect, additional)))
}
