//! The reservation that a host takes on its namespaces, so that no other host writes to them (Base 2.0,
//! section 8.19).
//!
//! A process has a host identifier of its own, so that a second one on the same machine is another host. A
//! reservation whose holder has no controller is taken over: its process has ended, or lost its connection.
//! One whose holder has a controller is an error that names the holder.

use std::fmt;
use std::sync::LazyLock;

use block_io::Status;
use nvme::{AdminData, IoQueues};
use reactor::Core;
use uuid::Uuid;
use wire_nvme::Sqe;
use wire_nvme::reservation::{
    AcquireAction, KEYS_SIZE, PersistChange, RegisterAction, RegisteredController, ReservationAcquire,
    ReservationRegister, ReservationReport, ReservationStatus, ReservationType, encode_keys,
};

/// Registered controllers that are read of a report.
const REGISTRANTS_MAX: usize = 256;
/// Controller identifier of a host without a controller (Base 2.0, section 7.5).
const NO_CONTROLLER: u16 = 0xffff;

/// What other hosts may do with the namespaces of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathReservation {
    /// Read.
    WriteExclusive,
    /// Nothing.
    ExclusiveAccess,
}

impl PathReservation {
    /// A host identifier that no other process has.
    pub fn host_id() -> [u8; 16] {
        static HOST_ID: LazyLock<Uuid> = LazyLock::new(Uuid::new_v4);
        *HOST_ID.as_bytes()
    }

    fn kind(self) -> ReservationType {
        match self {
            PathReservation::WriteExclusive => ReservationType::WriteExclusive,
            PathReservation::ExclusiveAccess => ReservationType::ExclusiveAccess,
        }
    }
}

/// Why a namespace is not reserved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ReservationError {
    /// The host that holds it has this controller.
    HeldBy { host_id: [u8; 16], cntlid: u16 },
    /// Another host was faster.
    Conflict,
    /// This host has a reservation of another type, by another path.
    OtherType(ReservationType),
    /// This host had it before, and has it no longer: another program may have written meanwhile.
    Lost,
    /// A command failed.
    Failed(&'static str, String),
}

impl fmt::Display for ReservationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReservationError::HeldBy { host_id, cntlid } => {
                let host = Uuid::from_bytes(*host_id);
                write!(f, "reserved by another program: host {host}, connected as controller {cntlid}")
            }
            ReservationError::Conflict => write!(f, "another program reserved it at the same time"),
            ReservationError::OtherType(kind) => {
                write!(f, "this program has another reservation of it ({kind:?}): give each path the same")
            }
            ReservationError::Lost => f.write_str(
                "its reservation is gone, and another program may have written since: detach the controller, \
                 and attach it again",
            ),
            ReservationError::Failed(what, why) => write!(f, "{what}: {why}"),
        }
    }
}

/// Sends the commands of a namespace.
pub(crate) struct NamespaceReservation<'a> {
    pub(crate) core: &'a Core,
    pub(crate) queues: &'a dyn IoQueues,
    pub(crate) nsid: u32,
    /// Of the controller.
    pub(crate) host_id: [u8; 16],
    pub(crate) timeout_ns: u64,
}

impl NamespaceReservation<'_> {
    /// The key of the host: a version 4 UUID has random bits in its first half, which is not zero.
    fn key(&self) -> u64 {
        Uuid::from_bytes(self.host_id).as_u64_pair().0
    }

    /// Takes the reservation, or finds that this host has it. One that `had_it` before, as on a connection
    /// that was lost, and is not registered any more, does not take it again.
    pub(crate) async fn take(
        &self,
        reservation: PathReservation,
        had_it: bool,
    ) -> Result<(), ReservationError> {
        let kind = reservation.kind();
        let status = self.report().await?;
        let own = status.registrants.iter().find(|one| one.host_id == self.host_id);
        if own.is_some_and(|own| own.holder) && status.kind == Some(kind) {
            return Ok(());
        }
        if own.is_none() && had_it {
            return Err(ReservationError::Lost);
        }
        if let (Some(own), Some(other)) = (own, status.kind)
            && own.holder
        {
            return Err(ReservationError::OtherType(other));
        }
        let is_new = own.is_none();
        let holder = other_holder(&status, self.host_id)?;
        if is_new {
            self.register_persistently().await?;
        }
        let (action, other) = match holder {
            Some(holder) => (AcquireAction::Preempt, holder.key),
            None => (AcquireAction::Acquire, 0),
        };
        let acquire = ReservationAcquire { action, ignore_key: false, kind };
        let acquired = self.send_keys("reserving", acquire.to_sqe(), encode_keys(self.key(), other)).await;
        if acquired == Err(ReservationError::Conflict) && is_new {
            // Another host has it: this one must not stay registered.
            self.register(RegisterAction::Unregister, PersistChange::None).await?;
        }
        acquired
    }

    /// Gives the reservation up, and the registration.
    pub(crate) async fn release(&self) -> Result<(), ReservationError> {
        self.register(RegisterAction::Unregister, PersistChange::None).await
    }

    /// Registers, through a restart of the controller if that can keep registrations.
    async fn register_persistently(&self) -> Result<(), ReservationError> {
        match self.register(RegisterAction::Register, PersistChange::Persistent).await {
            Err(ReservationError::Failed(..)) => {
                self.register(RegisterAction::Register, PersistChange::None).await
            }
            done => done,
        }
    }

    async fn register(&self, action: RegisterAction, persist: PersistChange) -> Result<(), ReservationError> {
        let register = ReservationRegister { action, ignore_key: false, persist };
        let keys = match action {
            RegisterAction::Register => encode_keys(0, self.key()),
            RegisterAction::Unregister | RegisterAction::Replace => encode_keys(self.key(), 0),
        };
        self.send_keys("registering for reservations", register.to_sqe(), keys).await
    }

    async fn send_keys(
        &self,
        what: &'static str,
        sqe: Sqe,
        keys: [u8; KEYS_SIZE],
    ) -> Result<(), ReservationError> {
        self.send(what, sqe, AdminData::Out(keys.to_vec())).await.map(drop)
    }

    async fn report(&self) -> Result<ReservationStatus, ReservationError> {
        const WHAT: &str = "reading the reservation";
        let length = ReservationStatus::size(REGISTRANTS_MAX, true);
        let report = ReservationReport { extended: true, length_bytes: length as u64 };
        let data = self.send(WHAT, report.to_sqe(), AdminData::In(length)).await?;
        ReservationStatus::decode(&data, true)
            .map_err(|error| ReservationError::Failed(WHAT, error.to_string()))
    }

    async fn send(&self, what: &'static str, sqe: Sqe, data: AdminData) -> Result<Vec<u8>, ReservationError> {
        let sqe = Sqe { nsid: self.nsid, ..sqe };
        let executed = self.queues.execute(self.core, sqe, &data, &AdminData::None, self.timeout_ns).await;
        let output = executed.map_err(|error| ReservationError::Failed(what, error.to_string()))?;
        if output.status == Status::SUCCESS {
            return Ok(output.data);
        }
        match output.status.same_code(Status::RESERVATION_CONFLICT) {
            true => Err(ReservationError::Conflict),
            false => Err(ReservationError::Failed(what, output.status.to_string())),
        }
    }
}

/// The other host that holds the reservation and may be preempted: it has no controller.
fn other_holder(
    status: &ReservationStatus,
    own: [u8; 16],
) -> Result<Option<&RegisteredController>, ReservationError> {
    let holders = || status.registrants.iter().filter(|one| one.holder && one.host_id != own);
    match holders().find(|one| one.cntlid != NO_CONTROLLER) {
        Some(one) => Err(ReservationError::HeldBy { host_id: one.host_id, cntlid: one.cntlid }),
        None => Ok(holders().next()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registrant(host_id: [u8; 16], cntlid: u16, holder: bool) -> RegisteredController {
        RegisteredController { cntlid, holder, host_id, key: 7 }
    }

    #[test]
    fn only_a_holder_without_a_controller_is_preempted() {
        let of = |registrants: Vec<RegisteredController>| {
            let status = ReservationStatus { registrants, ..ReservationStatus::default() };
            other_holder(&status, [9; 16]).map(|holder| holder.copied())
        };
        let [a, b] = [[1; 16], [2; 16]];
        assert_eq!(of(vec![registrant(a, 3, false), registrant([9; 16], 4, true)]), Ok(None));
        let gone = registrant(a, NO_CONTROLLER, true);
        assert_eq!(of(vec![registrant(b, 3, false), gone]), Ok(Some(gone)));
        let error = of(vec![gone, registrant(b, 3, true)]).unwrap_err();
        assert_eq!(error, ReservationError::HeldBy { host_id: b, cntlid: 3 });
        assert!(error.to_string().contains("02020202-0202"), "{error}");
    }
}
