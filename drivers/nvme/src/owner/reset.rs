//! Reset, failure and shutdown of a controller.
//!
//! The order is always the same: submissions stop; the device stops accessing memory, confirmed by CSTS.RDY
//! or enforced by disabling its DMA; only then are the commands in flight aborted and their buffers returned.

use std::rc::Rc;
use std::sync::atomic::Ordering;

use block_io::Status;
use wire_nvme::doorbell::DoorbellBuffer;
use wire_nvme::registers::{ControllerConfiguration, ShutdownNotification, ShutdownStatus};

use super::{AdminOutcome, ControllerOwner};
use crate::error::ControllerFailure;
use crate::shared::{ResetKind, RunState};

/// Most resets within [`RESET_WINDOW_NS`]; a controller that needs more is taken offline.
const RESETS_MAX: usize = 8;
const RESET_WINDOW_NS: u64 = 60_000_000_000;
/// Least time allowed for a shutdown (RTD3E may ask for up to ten times that).
const SHUTDOWN_TIMEOUT_NS: u64 = 2_000_000_000;

impl ControllerOwner {
    /// Resets and enables the controller. Commands in flight complete with [`Status::ABORTED_BY_HOST`].
    pub(super) async fn reset(self: &Rc<Self>, kind: ResetKind) -> Result<(), ControllerFailure> {
        if kind == ResetKind::Controller {
            return self.reset_controller().await;
        }
        self.reset_with(kind).await
    }

    /// Resets the controller by CC.EN. Unlike [`reset`](Self::reset) it needs no `Rc`.
    pub(super) async fn reset_controller(&self) -> Result<(), ControllerFailure> {
        self.reset_with(ResetKind::Controller).await
    }

    async fn reset_with(&self, kind: ResetKind) -> Result<(), ControllerFailure> {
        if self.shared.state_word().state() == RunState::Dead {
            return Err(self.reason());
        }
        if self.resetting.replace(true) {
            // Wait for the reset in progress and share its outcome.
            while self.resetting.get() {
                self.core.sleep_ns(1_000_000).await;
            }
            return self.shared.failure().map_or(Ok(()), Err);
        }
        let now_ns = self.core.now_ns();
        let too_many = {
            let mut resets = self.resets.borrow_mut();
            resets.retain(|at| now_ns.saturating_sub(*at) < RESET_WINDOW_NS);
            resets.push(now_ns);
            resets.len() > RESETS_MAX
        };
        let outcome = match (too_many, self.shared.params.get()) {
            (true, _) => Err(ControllerFailure::ResetFailed),
            // Initialization is not complete: attaching fails.
            (false, None) => Err(ControllerFailure::AdminTimeout),
            (false, Some(_)) => self.reset_and_enable(kind).await,
        };
        self.resetting.set(false);
        if let Err(failure) = outcome {
            self.fail(failure).await;
            return Err(failure);
        }
        Ok(())
    }

    async fn reset_and_enable(&self, kind: ResetKind) -> Result<(), ControllerFailure> {
        let params = self.shared.params();
        self.shared.set_state(RunState::Stopping);
        match kind {
            ResetKind::Controller => {}
            ResetKind::Subsystem if !params.capabilities.subsystem_reset => {}
            ResetKind::Subsystem => self.registers().reset_subsystem()?,
            ResetKind::Function => {
                // If the transport cannot reset the function, CC.EN below resets the controller.
                let _ = self.shared.device().reset();
            }
        }
        if let Err(failure) = self.disable(&params.capabilities).await {
            // CC.EN did not disable the controller: disable DMA and reset the function.
            self.shared.device().disable_dma().map_err(|_| failure)?;
            self.shared.device().reset().map_err(|_| failure)?;
            self.shared.device().enable_dma().map_err(|_| failure)?;
            self.disable(&params.capabilities).await?;
        }
        self.shared.set_state(RunState::Stopped);
        self.abort_admin_commands();
        if self.registers().capabilities()? != params.capabilities {
            return Err(ControllerFailure::CapabilitiesChanged);
        }
        // A function reset clears bus mastering.
        self.shared.device().enable_dma().map_err(|_| ControllerFailure::ResetFailed)?;
        self.enable(&params.capabilities).await?;
        let enabled = self.enable_extended_formats(&params.identity).await;
        enabled.map_err(|_| ControllerFailure::ResetFailed)?;
        let granted = self.request_queues().await.map_err(|_| ControllerFailure::ResetFailed)?;
        if granted < u32::from(params.queues_max) {
            return Err(ControllerFailure::CapabilitiesChanged);
        }
        if let Some(address) = self.shadow_address.get() {
            let sqe = DoorbellBuffer { shadow: address, events: address + (1 << params.page_log2) }.to_sqe();
            self.execute_raw(sqe).await.map_err(|_| ControllerFailure::ResetFailed)?;
        }
        self.start_events().await;
        self.shared.resets.fetch_add(1, Ordering::Relaxed);
        // Each queue pair now resets its rings and requests its creation.
        self.shared.set_state(RunState::Running);
        Ok(())
    }

    /// Aborts the admin commands in flight. The device must no longer access their memory.
    fn abort_admin_commands(&self) {
        let (mut ios, mut done) = (Vec::new(), Vec::new());
        if let Some(queue) = &mut *self.queue.borrow_mut() {
            queue.abort_all(Status::ABORTED_BY_HOST, &mut ios, &mut done);
            queue.rings.reset();
        }
        self.event_requests.set(0);
        for executed in done {
            if let Some(pending) = self.pending.borrow_mut().remove(&executed.tag()) {
                pending.reply.send(AdminOutcome::Aborted);
            }
        }
    }

    /// Takes the controller offline permanently. Commands in flight fail.
    pub(super) async fn take_offline(&self, failure: ControllerFailure) {
        while self.resetting.replace(true) {
            self.core.sleep_ns(1_000_000).await;
            if self.shared.state_word().state() == RunState::Dead {
                return;
            }
        }
        self.fail(failure).await;
        self.resetting.set(false);
    }

    async fn fail(&self, failure: ControllerFailure) {
        self.shared.set_failure(failure);
        if self.shared.state_word().state() == RunState::Dead {
            return;
        }
        self.shared.set_state(RunState::Stopping);
        if let Some(params) = self.shared.params.get()
            && failure != ControllerFailure::Removed
        {
            // An orderly disable first; disabling DMA below is what guarantees the stop.
            let _ = self.disable(&params.capabilities).await;
        }
        self.force_stop();
    }

    /// Disables the device's DMA, marks the controller dead and aborts admin commands, without waiting.
    pub(super) fn force_stop(&self) {
        let stopped = self.shared.device().disable_dma().is_ok() || !self.shared.device().is_present();
        if !stopped {
            // The device may still write: leak the memory that it may write instead of reusing it.
            self.shared.quarantine_memory();
        }
        self.shared.set_state(RunState::Dead);
        self.abort_admin_commands();
    }

    /// Normal shutdown, after the last handle is dropped.
    pub(super) async fn detach(&self) {
        if self.shared.state_word().state() != RunState::Dead {
            while self.resetting.replace(true) {
                self.core.sleep_ns(1_000_000).await;
            }
            self.shared.set_failure(ControllerFailure::Detached);
            if self.shared.state_word().state() != RunState::Dead {
                self.shared.set_state(RunState::Stopping);
                let _ = self.shut_down().await;
                self.force_stop();
            }
            self.resetting.set(false);
        }
        // The poller finishes on its next turn.
        self.finished.set(true);
    }

    /// Normal shutdown: sets CC.SHN, waits for CSTS.SHST (Base 2.0, section 3.6.1), then clears CC.EN.
    async fn shut_down(&self) -> Result<(), ControllerFailure> {
        let params = self.shared.params();
        let registers = self.registers();
        let configuration = registers.configuration()?;
        let shutdown = ShutdownNotification::Normal;
        registers.set_configuration(&ControllerConfiguration { shutdown, ..configuration })?;
        let rtd3e_ns = u64::from(params.identity.rtd3e_us) * 1000;
        let deadline_ns = self.core.now_ns() + rtd3e_ns.clamp(SHUTDOWN_TIMEOUT_NS, 10 * SHUTDOWN_TIMEOUT_NS);
        while registers.status()?.shutdown != ShutdownStatus::Complete && self.core.now_ns() < deadline_ns {
            self.core.sleep_ns(500_000).await;
        }
        self.disable(&params.capabilities).await
    }
}
