//! Stopping a controller, for a while or for good.
//!
//! Whatever the reason, the order is the same: nothing is submitted any more; the device lets go of
//! memory, by CSTS.RDY or because its way to memory is cut; then, and only then, every command in flight
//! is over and its buffer goes back.

use std::rc::Rc;
use std::sync::atomic::Ordering;

use ring::Status;
use sys::clock::now_ns;
use wire_nvme::doorbell::DoorbellBuffer;
use wire_nvme::registers::{Configuration, ShutdownNotification, ShutdownStatus};

use super::Owner;
use crate::error::Failure;
use crate::shared::{ResetKind, State};

/// Resets within [`RESETS_NS`] that are one too many: a controller that needs more is of no use.
const RESETS_MAX: usize = 8;
const RESETS_NS: u64 = 60_000_000_000;
/// How long a shutdown may take when the controller does not say.
const SHUTDOWN_NS: u64 = 2_000_000_000;

impl Owner {
    /// Resets the controller and brings it up again. Every command in flight is over.
    pub(super) async fn reset(self: &Rc<Self>, how: ResetKind) -> Result<(), Failure> {
        if how == ResetKind::Controller {
            return self.reset_now().await;
        }
        self.reset_by(how).await
    }

    /// The same by CC.EN, for those who have no counted reference.
    pub(super) async fn reset_now(&self) -> Result<(), Failure> {
        self.reset_by(ResetKind::Controller).await
    }

    async fn reset_by(&self, how: ResetKind) -> Result<(), Failure> {
        if self.shared.signal().state() == State::Dead {
            return Err(self.reason());
        }
        if self.resetting.replace(true) {
            // One that is under way does for both.
            while self.resetting.get() {
                self.core.sleep_ns(1_000_000).await;
            }
            return self.shared.failure().map_or(Ok(()), Err);
        }
        let now_ns = now_ns();
        let too_many = {
            let mut resets = self.resets.borrow_mut();
            resets.retain(|at| now_ns.saturating_sub(*at) < RESETS_NS);
            resets.push(now_ns);
            resets.len() > RESETS_MAX
        };
        let outcome = match (too_many, self.shared.facts.get()) {
            (true, _) => Err(Failure::ResetFailed),
            // It was not even identified: whoever attaches it tries again, or not.
            (false, None) => Err(Failure::AdminTimeout),
            (false, Some(_)) => self.cycle(how).await,
        };
        self.resetting.set(false);
        if let Err(failure) = outcome {
            self.end(failure).await;
            return Err(failure);
        }
        Ok(())
    }

    async fn cycle(&self, how: ResetKind) -> Result<(), Failure> {
        let facts = self.shared.facts();
        self.shared.set_state(State::Stopping);
        match how {
            ResetKind::Controller => {}
            ResetKind::Subsystem if !facts.capabilities.subsystem_reset => {}
            ResetKind::Subsystem => self.registers().reset_subsystem()?,
            ResetKind::Function => {
                // A device that cannot is reset by CC.EN below.
                let _ = self.shared.device().reset();
            }
        }
        if let Err(failure) = self.disable(&facts.capabilities).await {
            // It does not stop by being asked: its way to memory is cut, and the function reset.
            self.shared.device().stop().map_err(|_| failure)?;
            self.shared.device().reset().map_err(|_| failure)?;
            self.shared.device().start().map_err(|_| failure)?;
            self.disable(&facts.capabilities).await?;
        }
        self.shared.set_state(State::Stopped);
        self.end_admin_commands();
        if self.registers().capabilities()? != facts.capabilities {
            return Err(Failure::CapabilitiesChanged);
        }
        // A reset of the function has taken it away.
        self.shared.device().start().map_err(|_| Failure::ResetFailed)?;
        self.enable(&facts.capabilities).await?;
        let given = self.request_queues().await.map_err(|_| Failure::ResetFailed)?;
        if given < u32::from(facts.queues_max) {
            return Err(Failure::CapabilitiesChanged);
        }
        if let Some(address) = self.shadow_at.get() {
            let sqe = DoorbellBuffer { shadow: address, events: address + (1 << facts.page_log2) }.to_sqe();
            self.execute_raw(sqe).await.map_err(|_| Failure::ResetFailed)?;
        }
        self.start_events().await;
        self.shared.resets.fetch_add(1, Ordering::Relaxed);
        // Each queue pair empties its rings and asks to be created anew.
        self.shared.set_state(State::Running);
        Ok(())
    }

    /// Ends the admin commands in flight; the device has let go of them.
    fn end_admin_commands(&self) {
        let (mut ios, mut done) = (Vec::new(), Vec::new());
        if let Some(queue) = &mut *self.queue.borrow_mut() {
            queue.end_all(Status::ABORTED_BY_HOST, &mut ios, &mut done);
            queue.rings.reset();
        }
        self.event_requests.set(0);
        for executed in done {
            if let Some(waiting) = self.waiting.borrow_mut().remove(&executed.tag()) {
                waiting.reply.put(executed);
            }
        }
    }

    /// Takes the controller offline for a reason; every command in flight is over.
    pub(super) async fn offline(&self, failure: Failure) {
        while self.resetting.replace(true) {
            self.core.sleep_ns(1_000_000).await;
            if self.shared.signal().state() == State::Dead {
                return;
            }
        }
        self.end(failure).await;
        self.resetting.set(false);
    }

    async fn end(&self, failure: Failure) {
        self.shared.set_failure(failure);
        if self.shared.signal().state() == State::Dead {
            return;
        }
        self.shared.set_state(State::Stopping);
        if let Some(facts) = self.shared.facts.get()
            && failure != Failure::Removed
        {
            // Asked nicely first; what makes sure of it is the cut below.
            let _ = self.disable(&facts.capabilities).await;
        }
        self.let_go();
    }

    /// Cuts the device's way to memory and ends everything, at once.
    pub(super) fn let_go(&self) {
        let stopped = self.shared.device().stop().is_ok() || !self.shared.device().is_present();
        if !stopped {
            // It may still write. Memory that it may write is never anybody else's again.
            self.shared.forsake();
        }
        self.shared.set_state(State::Dead);
        self.end_admin_commands();
    }

    /// The last user has let go: a normal shutdown.
    pub(super) async fn detach(&self) {
        if self.shared.signal().state() != State::Dead {
            while self.resetting.replace(true) {
                self.core.sleep_ns(1_000_000).await;
            }
            self.shared.set_failure(Failure::Detached);
            if self.shared.signal().state() != State::Dead {
                self.shared.set_state(State::Stopping);
                let _ = self.shut_down().await;
                self.let_go();
            }
            self.resetting.set(false);
        }
        // The poller's next turn ends it.
        self.over.set(true);
    }

    /// CC.SHN, and CSTS.SHST after it (Base 2.0, section 3.6.1), then CC.EN.
    async fn shut_down(&self) -> Result<(), Failure> {
        let facts = self.shared.facts();
        let registers = self.registers();
        let configuration = registers.configuration()?;
        let shutdown = ShutdownNotification::Normal;
        registers.set_configuration(&Configuration { shutdown, ..configuration })?;
        let told_ns = u64::from(facts.identity.rtd3e_us) * 1000;
        let deadline_ns = now_ns() + told_ns.clamp(SHUTDOWN_NS, 10 * SHUTDOWN_NS);
        while registers.status()?.shutdown != ShutdownStatus::Complete && now_ns() < deadline_ns {
            self.core.sleep_ns(500_000).await;
        }
        self.disable(&facts.capabilities).await
    }
}
