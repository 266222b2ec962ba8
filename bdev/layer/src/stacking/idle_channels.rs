//! Idle channels to bases that left the set: their user does not poll them, so that the core closes them.

use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use reactor::Core;

/// Closes channels that are idle, to bases that have left.
pub(super) trait ReleaseIdle {
    fn release_idle(&mut self);
}

/// Wakes the task of a core that closes idle channels.
#[derive(Default)]
pub(super) struct ReleaseSignal(Mutex<Option<Waker>>);

impl ReleaseSignal {
    /// From any thread.
    pub(super) fn wake(&self) {
        let waker = sync::lock(&self.0).take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The open channels of a core to sets of bases, with one task for all of them.
#[derive(Default)]
pub(super) struct IdleChannels {
    signal: Arc<ReleaseSignal>,
    channels: RefCell<Vec<Weak<RefCell<dyn ReleaseIdle>>>>,
    is_running: Cell<bool>,
}

impl IdleChannels {
    /// Adds channels, which are known until they are dropped, and returns what makes the core look at them.
    pub(super) fn add(core: &Core, channels: Weak<RefCell<dyn ReleaseIdle>>) -> Arc<ReleaseSignal> {
        let all = core.local::<IdleChannels>();
        all.channels.borrow_mut().push(channels);
        if !all.is_running.get() {
            let task = all.clone();
            // Without it, they are closed at their next use.
            all.is_running.set(core.spawn(async move { task.run().await }));
        }
        all.signal.clone()
    }

    async fn run(self: Rc<Self>) {
        let mut turn = pin!(std::future::poll_fn(|context| {
            // First, so that no change is missed.
            *sync::lock(&self.signal.0) = Some(context.waker().clone());
            let open: Vec<_> = {
                let mut channels = self.channels.borrow_mut();
                channels.retain(|channels| channels.strong_count() > 0);
                channels.iter().filter_map(Weak::upgrade).collect()
            };
            for channels in &open {
                channels.borrow_mut().release_idle();
            }
            if open.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        }));
        turn.as_mut().await;
        self.is_running.set(false);
    }
}
