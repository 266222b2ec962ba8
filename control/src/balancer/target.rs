//! What a target shows of its connections, and does for them.

/// A target whose connections can move between reactors.
pub trait BalancedTarget: Send + Sync {
    /// The name of its poller on each reactor, which has its busy time.
    fn name(&self) -> &'static str;

    /// Indexes of the reactors that serve its connections, ascending. Connections move between these.
    fn reactors(&self) -> Vec<usize>;

    /// The connections that can move, in the order of [`reactors`](Self::reactors), with their work since the
    /// last call. `None` if a reactor does not answer. Waits for the reactors.
    fn loads(&self) -> Option<Vec<Vec<ConnectionLoad>>>;

    /// Has the reactors with these indexes get no connection that is accepted from now on, and all others get
    /// some. By default connections are assigned to any.
    fn exclude_reactors(&self, reactors: &[usize]) {
        _ = reactors;
    }

    /// Moves connections, each as soon as it can. What has closed since, or cannot move, stays.
    fn move_connections(&self, moves: &[ConnectionMove]);
}

/// What a connection did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLoad {
    /// Names it on its reactor, until it closes or moves.
    pub id: u64,
    /// Units of work, by which the time of the target is divided among its connections.
    pub work: u64,
    /// It may move to where there is less to do: it has not moved just before.
    pub is_movable: bool,
    /// It may move at all: it is not about to, and was not just before without being ready in time.
    pub can_begin: bool,
}

/// A connection that is to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionMove {
    /// [`ConnectionLoad::id`].
    pub id: u64,
    /// The place of its reactor in [`BalancedTarget::reactors`].
    pub from: usize,
    /// That of the other.
    pub to: usize,
}
