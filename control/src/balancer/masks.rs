//! On which cores the connections of a thread may be, as `thread_set_cpumask` says.
//!
//! A thread of SPDK moves between cores with all that it serves. Here a thread is a reactor, and stays on its
//! core; what it serves moves. So a mask without the reactor's own core has its connections move to the
//! reactors on the cores of the mask, and keeps others away.

use std::collections::BTreeMap;

use super::target::{ConnectionLoad, ConnectionMove};

/// Moves of one target in a period: what a reactor queues.
const MOVES_MAX: usize = 1024;

/// The masks that were set, by the index of the reactor.
#[derive(Clone, Debug, Default)]
pub(crate) struct ThreadMasks(BTreeMap<usize, ThreadMask>);

#[derive(Clone, Debug)]
struct ThreadMask {
    /// The cores of the mask.
    cpus: Vec<u32>,
    /// The reactors on these cores, for its connections; `None` if its own core is one of them.
    others: Option<Vec<usize>>,
}

/// Why a mask cannot be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MaskError {
    /// No reactor is on a core of the mask.
    #[error("there is no reactor on any of its cores")]
    NoReactor,
    /// The reactors on the cores of the mask get no connections.
    #[error("connections are kept away from all of its cores, by masks of their threads")]
    Excluded,
    /// The mask of this reactor would have no core for its connections any more.
    #[error("connections of thread {} have to be on its core", .0 + 1)]
    Needed(usize),
    /// The program ends.
    #[error("the program ends")]
    Stopped,
    /// The thread that moves connections cannot be created.
    #[error("no thread can be created: {0}")]
    Thread(std::io::ErrorKind),
}

impl ThreadMasks {
    /// These, with another mask of a reactor. `cores` are those of all reactors, by their indexes.
    ///
    /// # Errors
    /// Connections could be on no core.
    pub(super) fn with(&self, reactor: usize, cpus: &[u32], cores: &[u32]) -> Result<ThreadMasks, MaskError> {
        let in_mask: Vec<usize> = (0..cores.len()).filter(|other| cpus.contains(&cores[*other])).collect();
        if in_mask.is_empty() {
            return Err(MaskError::NoReactor);
        }
        let others = (!in_mask.contains(&reactor)).then_some(in_mask);
        let mut masks = self.clone();
        masks.0.insert(reactor, ThreadMask { cpus: cpus.to_vec(), others });
        let lacks_core = |one: &usize| {
            let others = masks.0[one].others.as_ref();
            others.is_some_and(|others| others.iter().all(|other| masks.excludes(*other)))
        };
        if lacks_core(&reactor) {
            return Err(MaskError::Excluded);
        }
        match masks.0.keys().copied().find(lacks_core) {
            Some(other) => Err(MaskError::Needed(other)),
            None => Ok(masks),
        }
    }

    /// The cores of the mask that was set for a reactor.
    pub(super) fn cpus(&self, reactor: usize) -> Option<&[u32]> {
        self.0.get(&reactor).map(|mask| &mask.cpus[..])
    }

    /// Whether a reactor gets no connections.
    pub(super) fn excludes(&self, reactor: usize) -> bool {
        self.0.get(&reactor).is_some_and(|mask| mask.others.is_some())
    }

    /// The reactors that get no connections.
    pub(super) fn excluded(&self) -> Vec<usize> {
        self.0.keys().copied().filter(|reactor| self.excludes(*reactor)).collect()
    }

    /// The moves of a target's connections away from such reactors: each to the reactor with the fewest, of
    /// those that its mask has. What has no such reactor stays, and for a while what was not ready in time.
    /// `reactors` and `loads` are the target's.
    pub(super) fn moves(&self, reactors: &[usize], loads: &[Vec<ConnectionLoad>]) -> Vec<ConnectionMove> {
        let mut counts: Vec<usize> = loads.iter().map(Vec::len).collect();
        let mut moves = Vec::new();
        for (from, reactor) in reactors.iter().enumerate() {
            let Some(others) = self.0.get(reactor).and_then(|mask| mask.others.as_ref()) else { continue };
            let connections = loads.get(from).into_iter().flatten();
            for connection in connections.filter(|connection| connection.can_begin) {
                let may_take =
                    |place: &usize| others.contains(&reactors[*place]) && !self.excludes(reactors[*place]);
                let to = (0..counts.len()).filter(may_take).min_by_key(|place| counts[*place]);
                let Some(to) = to.filter(|_| moves.len() < MOVES_MAX) else { break };
                counts[to] += 1;
                moves.push(ConnectionMove { id: connection.id, from, to });
            }
        }
        moves
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CORES: [u32; 4] = [2, 3, 6, 7];

    fn set(masks: &mut ThreadMasks, reactor: usize, cpus: &[u32]) -> Result<(), MaskError> {
        *masks = masks.with(reactor, cpus, &CORES)?;
        Ok(())
    }

    fn load(id: u64) -> ConnectionLoad {
        ConnectionLoad { id, work: 0, is_movable: false, can_begin: true }
    }

    #[test]
    fn a_mask_without_the_own_core_moves_connections_to_its_cores_evenly() {
        let mut masks = ThreadMasks::default();
        set(&mut masks, 0, &[6, 7, 40]).unwrap();
        assert_eq!((masks.excluded(), masks.cpus(0)), (vec![0], Some(&[6, 7, 40][..])));
        let late = ConnectionLoad { can_begin: false, ..load(9) };
        let loads = [vec![load(1), late, load(2), load(3)], vec![load(4)], vec![load(5)], vec![]];
        let moves = masks.moves(&[0, 1, 2, 3], &loads);
        let to: Vec<(u64, usize, usize)> = moves.iter().map(|one| (one.id, one.from, one.to)).collect();
        assert_eq!(to, [(1, 0, 3), (2, 0, 2), (3, 0, 3)]);
        // Places are those among the target's reactors; one without a reactor of the mask keeps its
        // connections.
        let moves = masks.moves(&[0, 3], &[vec![load(1)], vec![]]);
        assert_eq!(moves, [ConnectionMove { id: 1, from: 0, to: 1 }]);
        assert_eq!(masks.moves(&[0, 1], &[vec![load(1)], vec![]]), []);
        set(&mut masks, 0, &[2, 6]).unwrap();
        assert!(masks.excluded().is_empty() && masks.moves(&[0, 1, 2, 3], &loads).is_empty());
    }

    #[test]
    fn connections_always_have_a_core() {
        let mut masks = ThreadMasks::default();
        assert_eq!(set(&mut masks, 0, &[9]), Err(MaskError::NoReactor));
        set(&mut masks, 0, &[3, 6]).unwrap();
        assert_eq!(set(&mut masks, 1, &[2]), Err(MaskError::Excluded));
        set(&mut masks, 1, &[7]).unwrap();
        // Those of thread 1 could only be on core 3 or 6.
        assert_eq!(set(&mut masks, 2, &[7]), Err(MaskError::Needed(0)));
        assert_eq!(masks.excluded(), [0, 1]);
        // In no state does a move lead to a core that is excluded.
        let loads = [1, 2, 3, 4].map(|id| vec![load(id)]);
        for one in masks.moves(&[0, 1, 2, 3], &loads) {
            assert!(one.from < 2 && one.to >= 2, "{one:?}");
        }
    }

    #[test]
    fn a_core_whose_mask_is_lifted_takes_connections_again() {
        let mut masks = ThreadMasks::default();
        set(&mut masks, 1, &[6]).unwrap();
        set(&mut masks, 0, &[3, 6]).unwrap();
        set(&mut masks, 1, &[3]).unwrap();
        let moves = masks.moves(&[0, 1, 2, 3], &[vec![load(1)], vec![], vec![load(2)], vec![]]);
        assert_eq!(moves, [ConnectionMove { id: 1, from: 0, to: 1 }]);
    }
}
