//! Reservations through controllers: hosts with a controller each, commands as entries of a submission queue.

mod access;
mod commands;
mod completion;
mod host_identifier;
mod notifications;
mod report;
mod sharing;

use wire_nvme::fabrics::CNTLID_DYNAMIC;
use wire_nvme::reservation::{ReservationType, encode_keys};
use wire_nvme::{DataPointer, NSID_ALL};

use super::*;
use crate::harness::{connect_data, connect_sqe, subnqn, subsystem};
use crate::{
    ConnectContext, ConnectOk, ControllerLimits, NamespaceTable, Subsystem, SubsystemKind, SubsystemPort,
    connect, io,
};

const CONFLICT: Status = Status::RESERVATION_CONFLICT.do_not_retry();
const A: HostId = [1; 16];
const B: HostId = [2; 16];
const C: HostId = [3; 16];

fn register(action: RegisterAction, ignore_key: bool) -> ReservationRegister {
    ReservationRegister { action, ignore_key, persist: PersistChange::None }
}

fn acquire(action: AcquireAction, kind: ReservationType) -> ReservationAcquire {
    ReservationAcquire { action, ignore_key: false, kind }
}

fn release(action: ReleaseAction, kind: ReservationType) -> ReservationRelease {
    ReservationRelease { action, ignore_key: false, kind }
}

/// A host with its own controller of the subsystem.
struct TestHost {
    admin: crate::AdminConnect,
    table: NamespaceTable,
}

fn test_host(directory: &Arc<ControllerDirectory>, subsystem: &Arc<Subsystem>, host: HostId) -> TestHost {
    let limits = ControllerLimits::default();
    let mut data = connect_data(subnqn(), CNTLID_DYNAMIC);
    data[..16].copy_from_slice(&host);
    let place = ConnectContext { directory, limits: &limits, port: SubsystemPort::default(), secure: None };
    let connected = connect(&connect_sqe(0, 32, 0), &data, &place, |_| Some(subsystem.clone()));
    let Ok(ConnectOk::Admin(admin)) = connected else { panic!("refused: {connected:?}") };
    let table =
        NamespaceTable::for_controller(subsystem, 0, &limits, directory, &admin.registration.association);
    TestHost { admin, table }
}

impl TestHost {
    /// Executes a reservation command with its data on namespace 1.
    fn reserve(&self, sqe: Sqe, data: &[u8]) -> ReservationOutcome {
        let length = if data.is_empty() {
            ReservationReport::from_sqe(&sqe).length_bytes as usize
        } else {
            data.len()
        };
        let sqe = Sqe { nsid: 1, data: DataPointer::transport(length as u32), ..sqe };
        let plan = io::plan(&sqe, &self.table).unwrap();
        assert_eq!(plan.op, io::IoOp::Reservation);
        self.table.execute_reservation(&plan, data)
    }

    fn execute(&self, sqe: Sqe, data: &[u8]) -> Status {
        match self.reserve(sqe, data) {
            ReservationOutcome::Done(status) => status,
            other => panic!("{other:?}"),
        }
    }

    fn register(&self, key: u64) {
        let sqe = register(RegisterAction::Register, false).to_sqe();
        assert_eq!(self.execute(sqe, &encode_keys(0, key)), Status::SUCCESS);
    }
}
