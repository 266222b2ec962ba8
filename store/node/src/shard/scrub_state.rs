//! Parts that a shard is to compare with what other members of its group have, and what was found.

use std::collections::VecDeque;
use std::task::Waker;

use replica::{ClientReply, ObjectPart, ScrubOutcome};

use crate::once::OnceSender;

/// The client and the number of a read that repairs a block: no client has them, and a copy's repair is
/// another one.
pub(super) const REPAIR_READ: (u64, u64) = (0, u64::MAX - 1);

/// What was found in a part.
#[derive(Debug, Default)]
pub(crate) struct ScrubStep {
    /// The part; `None` if there are no more.
    pub(crate) part: Option<ObjectPart>,
    /// The replica is not the primary of its group: nothing was compared.
    pub(crate) is_elsewhere: bool,
    /// Bytes of the part that are allocated.
    pub(crate) bytes: u64,
    /// Copies of blocks that could not be read, of all members, and those of them that were written again.
    pub(crate) damaged: u64,
    pub(crate) repaired: u64,
    /// Blocks of which a member has other data than the primary: offset and member.
    pub(crate) differing: Vec<(u32, u32)>,
    /// A member did not answer, or the part was written all the time.
    pub(crate) is_uncompared: bool,
}

/// Parts that are to be compared, and what the first of them waits for.
#[derive(Default)]
pub(super) struct Scrubs {
    pub(super) wanted: VecDeque<(Option<ObjectPart>, OnceSender<ScrubStep>)>,
    pub(super) waker: Option<Waker>,
    /// The last scrub that the replica was asked for, and where its outcome goes.
    pub(super) number: u64,
    pub(super) outcome: Option<OnceSender<ScrubOutcome>>,
    /// Gets the answer to the read that repairs a block.
    pub(super) repair: Option<OnceSender<ClientReply>>,
}

impl Scrubs {
    /// The replica has compared a range.
    pub(super) fn take_outcome(&mut self, scrub: u64, outcome: ScrubOutcome) {
        if scrub == self.number {
            self.outcome.take().into_iter().for_each(|sender| sender.send(outcome.clone()));
        }
    }

    /// Takes the answer to a read that repairs a block; returns that of a client.
    pub(super) fn take_reply(&mut self, client: u64, number: u64, reply: ClientReply) -> Option<ClientReply> {
        if (client, number) != REPAIR_READ {
            return Some(reply);
        }
        self.repair.take().into_iter().for_each(|repair| repair.send(reply.clone()));
        None
    }
}
