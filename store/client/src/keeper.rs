//! A channel that is polled without requests, too.
//!
//! The owner of a channel polls it while it has requests in flight. A group ends a session that is silent, so
//! the sessions of an image without requests have to be renewed: a poller of the core polls the channel once a
//! period, which costs nothing in between.

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use bdev::{Completion, Request};
use block_io::Channel;
use reactor::{Core, Period, PollResult, Poller, Shutdown};

/// A channel that knows whether it has requests.
pub(crate) trait IdleChannel: Channel<Request = Request, Completion = Completion> {
    /// Whether no request is in flight.
    fn is_idle(&self) -> bool;
}

/// A channel whose owner polls it while it has requests, and the core's poller otherwise.
pub(crate) struct KeptChannel<C>(Rc<RefCell<C>>);

impl<C: IdleChannel + 'static> KeptChannel<C> {
    /// Has the core look after a channel once in each such period.
    pub(crate) fn start(core: &Core, channel: C, period_ns: u64) -> KeptChannel<C> {
        let channel = Rc::new(RefCell::new(channel));
        let keeper = Keeper { channel: Rc::downgrade(&channel), completions: Vec::new() };
        core.add_poller(Box::new(keeper), Period::EveryNs(period_ns));
        KeptChannel(channel)
    }
}

impl<C: Channel> Channel for KeptChannel<C> {
    type Request = C::Request;
    type Completion = C::Completion;

    fn submit(&mut self, batch: &mut Vec<C::Request>) {
        self.0.borrow_mut().submit(batch);
    }

    fn poll(&mut self, sink: &mut Vec<C::Completion>) -> usize {
        self.0.borrow_mut().poll(sink)
    }

    fn last_poll_ticks(&self) -> u64 {
        self.0.borrow().last_poll_ticks()
    }

    fn deadline(&self) -> Option<u64> {
        self.0.borrow().deadline()
    }
}

struct Keeper<C> {
    channel: Weak<RefCell<C>>,
    /// Empty.
    completions: Vec<Completion>,
}

impl<C: IdleChannel> Poller for Keeper<C> {
    fn name(&self) -> &str {
        "store client"
    }

    fn poll(&mut self, _now_ns: u64) -> PollResult {
        let Some(channel) = self.channel.upgrade() else { return PollResult::Finished };
        let mut channel = channel.borrow_mut();
        if channel.is_idle() {
            channel.poll(&mut self.completions);
            assert!(self.completions.is_empty(), "an idle channel completed a request");
        }
        PollResult::Idle
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        Shutdown::Done
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use block_io::{Op, Status, Tag};
    use reactor::{Reactor, ReactorConfig};

    use super::*;

    /// Completes requests when it is told to.
    struct CountedChannel {
        polls: Rc<Cell<u32>>,
        completes: Rc<Cell<bool>>,
        requests: Vec<Request>,
    }

    impl IdleChannel for CountedChannel {
        fn is_idle(&self) -> bool {
            self.requests.is_empty()
        }
    }

    impl Channel for CountedChannel {
        type Request = Request;
        type Completion = Completion;

        fn submit(&mut self, batch: &mut Vec<Request>) {
            self.requests.append(batch);
        }

        fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
            self.polls.set(self.polls.get() + 1);
            let before = sink.len();
            if self.completes.get() {
                sink.extend(self.requests.drain(..).map(|request| request.complete(Status::SUCCESS)));
            }
            sink.len() - before
        }
    }

    #[test]
    fn an_idle_channel_is_polled_and_the_completions_of_others_are_their_owners() {
        let reactor = Reactor::new(&ReactorConfig::default()).unwrap();
        let core = reactor.core();
        reactor.block_on(async move {
            let (polls, completes) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(true)));
            let counted =
                CountedChannel { polls: polls.clone(), completes: completes.clone(), requests: Vec::new() };
            let mut channel = KeptChannel::start(&core, counted, 1_000_000);
            while polls.get() < 3 {
                core.sleep_ns(100_000).await;
            }
            channel.submit(&mut vec![Request::new(Tag(7), Op::Flush, 0, 0)]);
            let before = polls.get();
            core.sleep_ns(5_000_000).await;
            assert_eq!(polls.get(), before, "the owner polls");
            let mut done = Vec::new();
            assert_eq!(channel.poll(&mut done), 1);
            assert_eq!(done[0].tag(), Tag(7));
            drop(channel);
            assert_eq!(Rc::strong_count(&polls), 1);
        });
    }
}
