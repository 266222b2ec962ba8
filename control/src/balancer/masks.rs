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
    /// The reactors that get the connections; `None` if the mask has the reactor's own core.
    takers: Option<Vec<usize>>,
}

impl ThreadMasks {
    /// Sets the mask of a reactor. `cores` are those of all reactors, by their indexes.
    ///
    /// # Errors
    /// Connections could be on no core. The reason; nothing is changed.
    pub(super) fn set(&mut self, reactor: usize, cpus: &[u32], cores: &[u32]) -> Result<(), String> {
        let own = cores.get(reactor).copied();
        if own.is_some_and(|own| cpus.contains(&own)) {
            self.0.insert(reactor, ThreadMask { cpus: cpus.to_vec(), takers: None });
            return Ok(());
        }
        let in_mask: Vec<usize> = (0..cores.len()).filter(|other| cpus.contains(&cores[*other])).collect();
        if in_mask.is_empty() {
            return Err("there is no reactor on any of its cores".to_string());
        }
        let takers: Vec<usize> = in_mask.iter().copied().filter(|other| !self.excludes(*other)).collect();
        if takers.is_empty() {
            return Err(
                "connections are kept away from all of its cores, by masks of their threads".to_string()
            );
        }
        for (other, mask) in &self.0 {
            let depends = mask
                .takers
                .as_ref()
                .is_some_and(|takers| takers.iter().all(|taker| *taker == reactor || self.excludes(*taker)));
            if depends {
                return Err(format!("connections of thread {} have to be on its core", other + 1));
            }
        }
        self.0.insert(reactor, ThreadMask { cpus: cpus.to_vec(), takers: Some(takers) });
        Ok(())
    }

    /// The cores of the mask that was set for a reactor.
    pub(super) fn cpus(&self, reactor: usize) -> Option<&[u32]> {
        self.0.get(&reactor).map(|mask| &mask.cpus[..])
    }

    /// Whether a reactor gets no connections.
    pub(super) fn excludes(&self, reactor: usize) -> bool {
        self.0.get(&reactor).is_some_and(|mask| mask.takers.is_some())
    }

    /// The reactors that get no connections.
    pub(super) fn excluded(&self) -> Vec<usize> {
        self.0.keys().copied().filter(|reactor| self.excludes(*reactor)).collect()
    }

    /// The moves of a target's connections away from such reactors: each to the reactor with the fewest, of
    /// those that its mask has. What has no such reactor stays. `reactors` and `loads` are the target's.
    pub(super) fn moves(&self, reactors: &[usize], loads: &[Vec<ConnectionLoad>]) -> Vec<ConnectionMove> {
        let mut counts: Vec<usize> = loads.iter().map(Vec::len).collect();
        let mut moves = Vec::new();
        for (from, reactor) in reactors.iter().enumerate() {
            let Some(takers) = self.0.get(reactor).and_then(|mask| mask.takers.as_ref()) else { continue };
            for connection in loads.get(from).into_iter().flatten() {
                let may_take =
                    |place: &usize| takers.contains(&reactors[*place]) && !self.excludes(reactors[*place]);
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

    #[test]
    fn a_mask_without_the_own_core_moves_connections_to_its_cores_evenly() {
        let mut masks = ThreadMasks::default();
        masks.set(0, &[6, 7, 40], &CORES).unwrap();
        assert_eq!((masks.excluded(), masks.cpus(0)), (vec![0], Some(&[6, 7, 40][..])));
        let load = |id| ConnectionLoad { id, work: 0, is_movable: false };
        let loads = [vec![load(1), load(2), load(3)], vec![load(4)], vec![load(5)], vec![]];
        let moves = masks.moves(&[0, 1, 2, 3], &loads);
        let to: Vec<(u64, usize, usize)> = moves.iter().map(|one| (one.id, one.from, one.to)).collect();
        assert_eq!(to, [(1, 0, 3), (2, 0, 2), (3, 0, 3)]);
        // Places are those among the target's reactors; one without a reactor of the mask keeps its
        // connections.
        let moves = masks.moves(&[0, 3], &[vec![load(1)], vec![]]);
        assert_eq!(moves, [ConnectionMove { id: 1, from: 0, to: 1 }]);
        assert_eq!(masks.moves(&[0, 1], &[vec![load(1)], vec![]]), []);
        masks.set(0, &[2, 6], &CORES).unwrap();
        assert!(masks.excluded().is_empty() && masks.moves(&[0, 1, 2, 3], &loads).is_empty());
    }

    #[test]
    fn connections_always_have_a_core() {
        let mut masks = ThreadMasks::default();
        assert!(masks.set(0, &[9], &CORES).unwrap_err().contains("no reactor"));
        masks.set(0, &[3, 6], &CORES).unwrap();
        assert!(masks.set(1, &[2], &CORES).unwrap_err().contains("kept away"));
        masks.set(1, &[7], &CORES).unwrap();
        // Those of thread 1 could only be on core 3 or 6.
        assert!(masks.set(2, &[7], &CORES).unwrap_err().contains("connections of thread 1"));
        assert_eq!(masks.excluded(), [0, 1]);
        // In no state does a move lead to a core that is excluded.
        let loads = [1, 2, 3, 4].map(|id| vec![ConnectionLoad { id, work: 0, is_movable: true }]);
        for one in masks.moves(&[0, 1, 2, 3], &loads) {
            assert!(one.from < 2 && one.to >= 2, "{one:?}");
        }
    }
}
