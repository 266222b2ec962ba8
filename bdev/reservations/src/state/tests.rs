pub(crate) mod oracle;
mod preemption;
mod registration;
mod release;
mod several;

use super::*;

pub(crate) fn host(id: u8) -> Registrant {
    Registrant::nvme_host([id; 16])
}

fn hosts(ids: &[u8]) -> Vec<Registrant> {
    ids.iter().map(|id| host(*id)).collect()
}

const A: u8 = 0xa;
const B: u8 = 0xb;
const C: u8 = 0xc;

pub(crate) fn register(key: u64) -> ReservationCommand {
    ReservationCommand::Register { key, persist: None }
}

pub(crate) fn acquire(kind: ReservationType, key: u64) -> ReservationCommand {
    ReservationCommand::Acquire { key, kind }
}

pub(crate) fn preempt(kind: ReservationType, key: u64, victim: u64) -> ReservationCommand {
    ReservationCommand::Preempt { key, victim, kind, abort: false }
}

/// A state in which A, B and C are registered with keys 0xa, 0xb and 0xc.
fn three_registrants() -> ReservationState {
    let mut state = ReservationState::default();
    for id in [A, B, C] {
        state.apply(&host(id), &register(id.into())).unwrap();
    }
    state
}
