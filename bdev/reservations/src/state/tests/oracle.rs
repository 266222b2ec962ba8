//! Random commands against a reference model: for every registrant its key and whether it is a holder, without an order
//! of registrations. The table of access is the specification's, as text.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// NVMe Base 2.0, section 8.19, and SPC-4, table 63: for each type the rows are read and write, the columns others,
/// registrants, and holders; `A` is allowed and `C` a conflict.
const MATRIX: [(ReservationType, [&str; 2]); 6] = [
    (ReservationType::WriteExclusive, ["AAA", "CCA"]),
    (ReservationType::ExclusiveAccess, ["CCA", "CCA"]),
    (ReservationType::WriteExclusiveRegistrants, ["AAA", "CAA"]),
    (ReservationType::ExclusiveAccessRegistrants, ["CAA", "CAA"]),
    (ReservationType::WriteExclusiveAll, ["AAA", "CAA"]),
    (ReservationType::ExclusiveAccessAll, ["CAA", "CAA"]),
];

#[derive(Clone, Debug, Default)]
struct ReferenceModel {
    keys: BTreeMap<u8, u64>,
    kind: Option<ReservationType>,
    holders: Vec<u8>,
    generation: u32,
}

impl ReferenceModel {
    fn is_all_registrants(&self) -> bool {
        matches!(self.kind, Some(ReservationType::WriteExclusiveAll | ReservationType::ExclusiveAccessAll))
    }

    fn release_without_holders(&mut self) {
        if self.is_all_registrants() {
            self.holders = self.keys.keys().copied().collect();
        }
        self.holders.retain(|id| self.keys.contains_key(id));
        if self.holders.is_empty() {
            self.kind = None;
        }
    }

    /// Returns whether the command succeeds. A model that does not is discarded by the caller.
    fn apply(&mut self, id: u8, command: &ReservationCommand) -> bool {
        use ReservationCommand::*;
        let own = self.keys.get(&id).copied();
        let counts = matches!(
            command,
            Register { .. } | Replace { .. } | Unregister { .. } | Preempt { .. } | Clear { .. }
        );
        let done = match *command {
            Register { key, .. } => key != 0 && own.is_none_or(|own| own == key) && self.set(id, key),
            Replace { expected: None, key, .. } => key != 0 && self.set(id, key),
            Replace { expected, key, .. } => {
                key != 0 && own.is_some() && own == expected && self.set(id, key)
            }
            Unregister { expected, .. } => {
                let matches = own.is_some() && (expected.is_none() || own == expected);
                self.keys.remove(&id);
                matches
            }
            SetPersistent(_) => true,
            // It needs another registrant.
            Move { .. } => false,
            Acquire { key, .. } | Preempt { key, .. } | Release { key, .. } | Clear { key }
                if own != Some(key) =>
            {
                false
            }
            Preempt { victim, kind, .. } => self.preempt(id, victim, kind),
            Acquire { kind, .. } => match self.kind {
                None => {
                    (self.kind, self.holders) = (Some(kind), vec![id]);
                    true
                }
                Some(held) => held == kind && self.holders.contains(&id),
            },
            Clear { .. } => {
                self.keys.clear();
                true
            }
            Release { kind, .. } => match self.kind {
                None => true,
                Some(held) if !self.holders.contains(&id) => is_nexus(id) || held == kind,
                Some(held) => {
                    (self.kind, self.holders) = (None, Vec::new());
                    held == kind
                }
            },
        };
        self.release_without_holders();
        self.generation += u32::from(counts);
        done
    }

    fn set(&mut self, id: u8, key: u64) -> bool {
        self.keys.insert(id, key);
        true
    }

    fn preempt(&mut self, id: u8, victim: u64, kind: ReservationType) -> bool {
        let holds_victim = self.holders.iter().any(|holder| self.keys[holder] == victim);
        let takes_over = match self.kind {
            None => false,
            Some(_) if self.is_all_registrants() => victim == 0,
            Some(_) => holds_victim,
        };
        if takes_over {
            self.keys.retain(|one, key| *one == id || (victim != 0 && *key != victim));
            (self.kind, self.holders) = (Some(kind), vec![id]);
            return true;
        }
        let found = self.keys.values().any(|key| *key == victim);
        self.keys.retain(|_, key| *key != victim);
        found
    }

    /// What a registrant loses, from the models before and after the command of another one.
    fn loss(&self, after: &ReferenceModel, command: &ReservationCommand, id: u8) -> Option<LossEvent> {
        if !self.keys.contains_key(&id) {
            return None;
        }
        if matches!(command, ReservationCommand::Clear { .. }) {
            return Some(LossEvent::ReservationPreempted);
        }
        if !after.keys.contains_key(&id) {
            return Some(LossEvent::RegistrationPreempted);
        }
        let for_holder_only =
            matches!(self.kind, Some(ReservationType::WriteExclusive | ReservationType::ExclusiveAccess));
        let is_notified = match (self.kind, after.kind) {
            (Some(_), None) => !for_holder_only,
            (Some(before), Some(after)) => before != after,
            (None, _) => false,
        };
        is_notified.then_some(LossEvent::ReservationReleased)
    }

    /// Whether it may read, and whether it may write.
    fn may(&self, id: u8) -> (bool, bool) {
        let Some((_, rows)) = MATRIX.iter().find(|(kind, _)| Some(*kind) == self.kind) else {
            return (true, true);
        };
        let column = match (self.holders.contains(&id), self.keys.contains_key(&id)) {
            (true, _) => 2,
            (_, true) => 1,
            _ => 0,
        };
        (rows[0].as_bytes()[column] == b'A', rows[1].as_bytes()[column] == b'A')
    }
}

fn is_nexus(id: u8) -> bool {
    id.is_multiple_of(2)
}

fn registrant(id: u8) -> Registrant {
    if is_nexus(id) { Registrant::scsi_nexus(&id.to_string(), "target").unwrap() } else { host(id) }
}

pub(crate) fn any_command() -> impl Strategy<Value = ReservationCommand> {
    use ReservationCommand::*;
    let key = || 0..4u64;
    let kind = || prop::sample::select(&ReservationType::ALL[..]);
    let expected = || prop::option::of(0..4u64);
    let persist = || prop::option::of(any::<bool>());
    prop_oneof![
        2 => (key(), persist()).prop_map(|(key, persist)| Register { key, persist }),
        1 => (expected(), key(), persist()).prop_map(|(expected, key, persist)| Replace { expected, key, persist }),
        1 => (expected(), persist()).prop_map(|(expected, persist)| Unregister { expected, persist }),
        2 => (key(), kind()).prop_map(|(key, kind)| Acquire { key, kind }),
        3 => (key(), key(), kind(), any::<bool>())
            .prop_map(|(key, victim, kind, abort)| Preempt { key, victim, kind, abort }),
        2 => (key(), kind()).prop_map(|(key, kind)| Release { key, kind }),
        1 => key().prop_map(|key| Clear { key }),
        1 => any::<bool>().prop_map(SetPersistent),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn random_commands_match_the_reference_model(
        commands in prop::collection::vec((1..5u8, any_command()), 0..60),
    ) {
        let (mut state, mut model) = (ReservationState::default(), ReferenceModel::default());
        for (id, command) in commands {
            let before = state.clone();
            let outcome = state.apply(&registrant(id), &command);
            let mut after = model.clone();
            let done = after.apply(id, &command);
            prop_assert_eq!(outcome.is_ok(), done, "{:?} of {} on {:?}", command, id, model);
            match outcome {
                Ok(effects) => {
                    for other in 1..5 {
                        let expected = model.loss(&after, &command, other).filter(|_| other != id);
                        let notices = effects.notices.iter().filter(|one| one.registrant == registrant(other));
                        let events: Vec<LossEvent> = notices.map(|one| one.event).collect();
                        prop_assert_eq!(events, Vec::from_iter(expected), "{:?} of {}", command, id);
                    }
                    let aborts = matches!(command, ReservationCommand::Preempt { abort: true, .. });
                    let preempted = effects.notified(LossEvent::RegistrationPreempted);
                    prop_assert_eq!(effects.abort, if aborts { preempted } else { Vec::new() });
                    model = after;
                }
                Err(_) => prop_assert_eq!(&state, &before),
            }
            prop_assert!(state.is_valid());
            prop_assert_eq!(state.generation, model.generation);
            prop_assert_eq!(state.reservation.as_ref().map(|held| held.kind), model.kind);
            for id in 1..6u8 {
                let registrant = registrant(id);
                prop_assert_eq!(state.key_of(&registrant), model.keys.get(&id).copied());
                prop_assert_eq!(state.is_holder(&registrant), model.holders.contains(&id));
                let denied = state.denied(&registrant);
                prop_assert_eq!((denied & access::READ == 0, denied & access::WRITE == 0), model.may(id));
            }
        }
    }
}
