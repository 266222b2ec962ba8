//! Which connections move to which core (sans-IO).
//!
//! Two rules, the second only where the first finds nothing:
//!
//! 1. **Time.** A core that is busier than another by [`GAP_PPM`] gives it connections, each of which costs
//!    at most half of the difference, so that every move makes the difference smaller and none is undone. A
//!    core that one connection keeps busy sheds its others in this way, and keeps that one.
//! 2. **Number.** On cores that are all busy, what connections would cost if they could is unknown. There the
//!    numbers of connections that do something become equal. A core of which one connection takes more than
//!    half gets none.
//!
//! What a core does for others than these connections is a part of its busy time like any other. Costs on a
//! saturated core are lower than what connections ask for, so that a decision can be followed by others; a
//! target has a connection stay for longer each time that it has moved, which ends what would go on.

/// A core that is busy for as much of its time is saturated: connections may wait for it.
const SATURATED_PPM: u32 = 900_000;
/// Cores whose busy times differ by less are even: measured times differ from one period to the next.
const GAP_PPM: u32 = 250_000;
/// The numbers of connections of saturated cores may differ by the larger number, divided by this.
const COUNT_TOLERANCE: usize = 8;
/// Moves of one decision.
pub(super) const MOVES_MAX: usize = 64;

/// What a core did in a period.
#[derive(Clone, Debug, Default)]
pub(super) struct CoreLoad {
    /// Busy time in millionths.
    pub(super) busy_ppm: u32,
    /// It gets no connections, and those that it has leave it anyway.
    pub(super) is_excluded: bool,
    /// The connections that have done something.
    pub(super) connections: Vec<LoadedConnection>,
}

/// A connection that has done something in a period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LoadedConnection {
    /// The index of its target.
    pub(super) target: usize,
    /// Its identifier on its core.
    pub(super) id: u64,
    /// Millionths of the core's time.
    pub(super) cost_ppm: u32,
    /// It may move now.
    pub(super) is_movable: bool,
}

/// A connection that is to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Decision {
    pub(super) target: usize,
    pub(super) id: u64,
    pub(super) from: usize,
    pub(super) to: usize,
}

/// Decides which connections move, at most [`MOVES_MAX`]. None if the cores are even.
pub(super) fn decide(mut cores: Vec<CoreLoad>) -> Vec<Decision> {
    let mut decisions = Vec::new();
    while decisions.len() < MOVES_MAX
        && let Some((from, index, to)) = move_for_time(&cores)
    {
        decisions.push(apply(&mut cores, from, index, to));
    }
    let saturated = SaturatedCores::of(&cores);
    if !decisions.is_empty() || saturated.are_even(&cores) {
        return decisions;
    }
    while decisions.len() < MOVES_MAX
        && let Some((from, index, to)) = saturated.next_move(&cores)
    {
        decisions.push(apply(&mut cores, from, index, to));
    }
    decisions
}

/// The connection that moves by the first rule: its core, its place there, and the other core.
fn move_for_time(cores: &[CoreLoad]) -> Option<(usize, usize, usize)> {
    let open = || cores.iter().enumerate().filter(|(_, core)| !core.is_excluded);
    let (to, coldest) = open().min_by_key(|(_, core)| core.busy_ppm)?;
    let mut hottest: Vec<usize> = open().map(|(core, _)| core).collect();
    hottest.sort_by_key(|core| std::cmp::Reverse(cores[*core].busy_ppm));
    hottest.into_iter().find_map(|from| {
        let gap_ppm = cores[from].busy_ppm - coldest.busy_ppm;
        if gap_ppm < GAP_PPM {
            return None;
        }
        let fits = |one: &LoadedConnection| one.is_movable && one.cost_ppm <= gap_ppm / 2;
        let candidates = cores[from].connections.iter().enumerate().filter(|(_, one)| fits(one));
        let (index, _) = candidates.max_by_key(|(_, one)| one.cost_ppm)?;
        Some((from, index, to))
    })
}

/// The cores that were saturated in a period.
struct SaturatedCores {
    all: Vec<usize>,
    /// Those that take connections of others.
    takers: Vec<usize>,
}

impl SaturatedCores {
    fn of(cores: &[CoreLoad]) -> SaturatedCores {
        let is_saturated = |core: &usize| cores[*core].busy_ppm >= SATURATED_PPM && !cores[*core].is_excluded;
        let all: Vec<usize> = (0..cores.len()).filter(is_saturated).collect();
        let takers = all.iter().copied().filter(|core| !cores[*core].is_dominated()).collect();
        SaturatedCores { all, takers }
    }

    /// The core with the most connections, of which one can move, and the one with the fewest that takes
    /// some.
    fn most_and_fewest(&self, cores: &[CoreLoad]) -> Option<(usize, usize)> {
        let count = |core: &usize| cores[*core].connections.len();
        let givers = self.all.iter().copied().filter(|core| cores[*core].ordinary().next().is_some());
        Some((givers.max_by_key(count)?, self.takers.iter().copied().min_by_key(count)?))
    }

    fn are_even(&self, cores: &[CoreLoad]) -> bool {
        let Some((most, fewest)) = self.most_and_fewest(cores) else { return true };
        let (most, fewest) = (cores[most].connections.len(), cores[fewest].connections.len());
        most < fewest + (most / COUNT_TOLERANCE).max(2)
    }

    /// The connection that moves by the second rule, until no move makes the numbers more even.
    fn next_move(&self, cores: &[CoreLoad]) -> Option<(usize, usize, usize)> {
        let (from, to) = self.most_and_fewest(cores)?;
        let is_uneven = cores[from].connections.len() >= cores[to].connections.len() + 2;
        is_uneven.then(|| cores[from].ordinary().next()).flatten().map(|index| (from, index, to))
    }
}

fn apply(cores: &mut [CoreLoad], from: usize, index: usize, to: usize) -> Decision {
    let connection = cores[from].connections.swap_remove(index);
    let LoadedConnection { target, id, cost_ppm, .. } = connection;
    cores[from].busy_ppm = cores[from].busy_ppm.saturating_sub(cost_ppm);
    cores[to].busy_ppm += cost_ppm;
    cores[to].connections.push(LoadedConnection { is_movable: false, ..connection });
    Decision { target, id, from, to }
}

impl CoreLoad {
    /// The places of the connections that can move and cost no more than twice the average.
    fn ordinary(&self) -> impl Iterator<Item = usize> {
        let total: u64 = self.connections.iter().map(|one| u64::from(one.cost_ppm)).sum();
        let count = self.connections.len() as u64;
        let is_ordinary =
            move |one: &LoadedConnection| one.is_movable && u64::from(one.cost_ppm) * count <= 2 * total;
        self.connections.iter().enumerate().filter(move |(_, one)| is_ordinary(one)).map(|(index, _)| index)
    }

    /// Whether one connection takes more than half of its busy time.
    fn is_dominated(&self) -> bool {
        self.connections.iter().any(|one| one.cost_ppm > self.busy_ppm / 2)
    }
}

#[cfg(test)]
mod tests;
