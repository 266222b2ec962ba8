//! One program at a time has a namespace.

use std::time::Duration;

use bdev::Access;
use bdev_nvme::rpc::NvmeModule;
use bdev_nvme::{Attach, PassthroughCommand, PathReservation, PathStatus, QueueKind};
use block_io::Status;
use control::Module;
use nvme::AdminData;
use nvmf::NamespaceConfig;
use wire_nvme::Sqe;
use wire_nvme::reservation::{
    AcquireAction, PersistChange, RegisterAction, RegisteredController, ReservationAcquire,
    ReservationRegister, ReservationReport, ReservationStatus, ReservationType, encode_keys,
};

use crate::sides::{HostSide, NQN, TargetSide, medium, wait_for};

fn attach(
    host: &HostSide,
    port: &str,
    host_id: [u8; 16],
    reservation: Option<PathReservation>,
) -> Result<(), String> {
    let mut path = HostSide::path(port);
    (path.options.host_id, path.reservation) = (host_id, reservation);
    host.initiator.attach(Attach::new("Nvme0", path)).map(drop).map_err(|error| error.to_string())
}

fn write(host: &HostSide) -> Result<(), Status> {
    let done = host.with_device(&host.registry, "Nvme0n1", Access::ReadWrite, |core, io| async move {
        let buffer = core.pool().take(4096).unwrap();
        io.write(0, buffer).await.map(drop).map_err(|(status, _)| status)
    });
    done.recv().unwrap()
}

fn read(host: &HostSide) -> Result<(), Status> {
    let done = host.with_device(&host.registry, "Nvme0n1", Access::ReadOnly, |core, io| async move {
        let buffer = core.pool().take(4096).unwrap();
        io.read(0, buffer).await.map(drop).map_err(|(status, _)| status)
    });
    done.recv().unwrap()
}

#[test]
fn a_second_program_is_refused_until_the_first_has_ended() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into(), "0".into()]);
    let ports = side.ports();
    let exclusive = Some(PathReservation::WriteExclusive);
    let (first, second, bystander) = (HostSide::start(), HostSide::start(), HostSide::start());
    let ids = [(); 3].map(|()| *uuid::Uuid::new_v4().as_bytes());
    // Both paths of a program have the reservation.
    attach(&first, &ports[0], ids[0], exclusive).unwrap();
    attach(&first, &ports[1], ids[0], exclusive).unwrap();
    write(&first).unwrap();
    let refused = attach(&second, &ports[0], ids[1], exclusive).unwrap_err();
    let holder = uuid::Uuid::from_bytes(ids[0]).to_string();
    assert!(
        refused.contains("namespace 1: reserved by another program") && refused.contains(&holder),
        "{refused}"
    );
    // One that takes no reservation reads, and does not write.
    attach(&bystander, &ports[0], ids[2], None).unwrap();
    read(&bystander).unwrap();
    assert!(write(&bystander).unwrap_err().same_code(Status::RESERVATION_CONFLICT));
    // One of the two paths ends, and then the other.
    let detach = |host: &HostSide, port: &str| {
        let path = HostSide::path(port).id;
        host.initiator.detach("Nvme0", |other| *other == path, &control::JobHandle::standalone()).unwrap();
    };
    detach(&first, &ports[1]);
    write(&first).unwrap();
    attach(&second, &ports[0], ids[1], exclusive).unwrap_err();
    detach(&first, &ports[0]);
    write(&bystander).unwrap();
    attach(&second, &ports[0], ids[1], Some(PathReservation::ExclusiveAccess)).unwrap();
    write(&second).unwrap();
    assert!(read(&bystander).unwrap_err().same_code(Status::RESERVATION_CONFLICT));
}

#[test]
fn a_reservation_whose_holder_has_no_connection_is_taken_over_and_the_holder_is_refused() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into()]);
    let ports = side.ports();
    let exclusive = Some(PathReservation::WriteExclusive);
    let (first, second) = (HostSide::start(), HostSide::start());
    let ids = [(); 2].map(|()| *uuid::Uuid::new_v4().as_bytes());
    attach(&first, &ports[0], ids[0], exclusive).unwrap();
    write(&first).unwrap();
    // The target closes its connections, and it may not come back: as a program that was killed.
    side.target.allow_any_host(NQN, false).unwrap();
    let nqn = |id: [u8; 16]| format!("nqn.2014-08.org.nvmexpress:uuid:{}", uuid::Uuid::from_bytes(id));
    side.target.add_host(NQN, &nqn(ids[1])).unwrap();
    let status = || first.initiator.controllers()[0].paths[0].status;
    side.target.remove_listener(NQN, side.addresses[0].clone()).unwrap();
    let address = side.target.add_listener(NQN, side.addresses[0].clone()).unwrap();
    wait_for("the first to lose its connection", || status() == PathStatus::Reconnecting);
    attach(&second, &address.trsvcid, ids[1], exclusive).unwrap();
    write(&second).unwrap();
    second.initiator.release_reservations();
    second.initiator.shutdown();
    // It is let in again, and nothing is reserved. What it sent may be in the way still, so it does not go
    // on.
    side.target.add_host(NQN, &nqn(ids[0])).unwrap();
    wait_for("the refusal", || {
        let failure = first.initiator.controllers()[0].paths[0].failure.clone();
        failure.is_some_and(|why| why.contains("its reservation is gone"))
    });
    assert_eq!(status(), PathStatus::Reconnecting);
    // Attached again it starts anew.
    first.initiator.detach("Nvme0", |_| true, &control::JobHandle::standalone()).unwrap();
    attach(&first, &address.trsvcid, ids[0], exclusive).unwrap();
    write(&first).unwrap();
}

#[test]
fn a_path_with_another_type_of_reservation_is_refused_and_the_first_keeps_its_own() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into(), "0".into()]);
    let ports = side.ports();
    let (first, second) = (HostSide::start(), HostSide::start());
    let ids = [(); 2].map(|()| *uuid::Uuid::new_v4().as_bytes());
    let (exclusive, other) = (Some(PathReservation::WriteExclusive), Some(PathReservation::ExclusiveAccess));
    attach(&first, &ports[0], ids[0], exclusive).unwrap();
    let refused = attach(&first, &ports[1], ids[0], other).unwrap_err();
    assert!(refused.contains("this program has another reservation"), "{refused}");
    write(&first).unwrap();
    attach(&second, &ports[0], ids[1], exclusive).unwrap_err();
}

/// Sends a command of an I/O queue for a host that has attached without a reservation.
fn pass(host: &HostSide, nsid: u32, sqe: Sqe, data: AdminData) -> Vec<u8> {
    let timeout = Some(Duration::from_secs(20));
    let sqe = Sqe { nsid, ..sqe };
    let command = PassthroughCommand { queue: QueueKind::Io, sqe, data, metadata: AdminData::None, timeout };
    let done = host.initiator.pass_through("Nvme0", command).unwrap();
    assert_eq!(done.status, Status::SUCCESS);
    done.data
}

/// Who is registered, as the namespace reports.
fn registrants(host: &HostSide, nsid: u32) -> Vec<RegisteredController> {
    let length = ReservationStatus::size(16, true);
    let report = ReservationReport { extended: true, length_bytes: length as u64 };
    let data = pass(host, nsid, report.to_sqe(), AdminData::In(length));
    ReservationStatus::decode(&data, true).unwrap().registrants
}

#[test]
fn a_failed_attach_leaves_no_registration() {
    let medium = medium();
    bdev::malloc::create(&medium, bdev::malloc::MallocConfig::new("Malloc1", 2048, 512)).unwrap();
    let side = TargetSide::start(&medium, &["0".into()]);
    side.target.add_namespace(NQN, NamespaceConfig::new("Malloc1")).unwrap();
    let ports = side.ports();
    let (holder, second) = (HostSide::start(), HostSide::start());
    let ids = [(); 2].map(|()| *uuid::Uuid::new_v4().as_bytes());
    attach(&holder, &ports[0], ids[0], None).unwrap();
    // The second namespace is another host's, the first is free.
    let register = ReservationRegister {
        action: RegisterAction::Register,
        ignore_key: false,
        persist: PersistChange::None,
    };
    pass(&holder, 2, register.to_sqe(), AdminData::Out(encode_keys(0, 7).to_vec()));
    let kind = ReservationType::WriteExclusive;
    let acquire = ReservationAcquire { action: AcquireAction::Acquire, ignore_key: false, kind };
    pass(&holder, 2, acquire.to_sqe(), AdminData::Out(encode_keys(7, 0).to_vec()));
    let refused = attach(&second, &ports[0], ids[1], Some(PathReservation::WriteExclusive)).unwrap_err();
    assert!(refused.contains("namespace 2: reserved by another program"), "{refused}");
    assert_eq!(registrants(&holder, 1), []);
    let left = registrants(&holder, 2);
    assert!(left.len() == 1 && left[0].host_id == ids[0] && left[0].holder, "{left:?}");
    write(&holder).unwrap();
}

#[test]
fn a_program_that_ends_in_order_releases_its_reservations() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into()]);
    let ports = side.ports();
    let (first, second) = (HostSide::start(), HostSide::start());
    let ids = [(); 2].map(|()| *uuid::Uuid::new_v4().as_bytes());
    attach(&second, &ports[0], ids[1], None).unwrap();
    let builder = control::ControlPlane::builder(Vec::new());
    let bdevs = bdev::rpc::BdevModule::new(first.registry.clone(), builder.examiner());
    let reactors = crate::sides::reactors();
    let module = NvmeModule::new(&bdevs, reactors.handles(), control::Keyring::default());
    let mut path = HostSide::path(&ports[0]);
    (path.options.host_id, path.reservation) = (ids[0], Some(PathReservation::ExclusiveAccess));
    module.initiator().attach(Attach::new("Nvme0", path)).unwrap();
    let held = registrants(&second, 1);
    assert!(held.len() == 1 && held[0].host_id == ids[0] && held[0].holder, "{held:?}");
    assert!(write(&second).unwrap_err().same_code(Status::RESERVATION_CONFLICT));
    // What SIGTERM does before anything is stopped.
    module.drain();
    assert_eq!(registrants(&second, 1), []);
    write(&second).unwrap();
    module.initiator().shutdown();
    drop(reactors);
}

#[test]
fn a_reservation_outlives_a_restart_of_a_target_that_keeps_it_in_a_file() {
    let file = std::env::temp_dir().join(format!("ringbolt-ptpl-{}", std::process::id()));
    let medium = medium();
    let persistent = || {
        let ptpl_file = Some(file.to_str().unwrap().to_owned());
        NamespaceConfig { ptpl_file, ..NamespaceConfig::new("Malloc0") }
    };
    let side = TargetSide::with_namespace(&medium, persistent(), &["0".into()]);
    let ports = side.ports();
    let (first, second) = (HostSide::start(), HostSide::start());
    let ids = [(); 2].map(|()| *uuid::Uuid::new_v4().as_bytes());
    let exclusive = Some(PathReservation::WriteExclusive);
    attach(&first, &ports[0], ids[0], exclusive).unwrap();
    write(&first).unwrap();
    drop(side);
    let side = TargetSide::with_namespace(&medium, persistent(), &ports);
    assert_eq!(side.ports(), ports);
    attach(&second, &ports[0], ids[1], None).unwrap();
    let held = registrants(&second, 1);
    assert!(held.len() == 1 && held[0].host_id == ids[0] && held[0].holder, "{held:?}");
    assert!(write(&second).unwrap_err().same_code(Status::RESERVATION_CONFLICT));
    // The holder comes back, and goes on.
    let status = || first.initiator.controllers()[0].paths[0].status;
    wait_for("the first to connect again", || status() == PathStatus::Enabled);
    write(&first).unwrap();
    drop(side);
    std::fs::remove_file(&file).unwrap();
}
