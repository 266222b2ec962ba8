//! The running program, as methods see it.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use bdev::Registry;
use bdev_nvme::Initiator;
use nvmf::Target;
use reactor::Remote;
use serde_json::Value;

use crate::config::Config;
use crate::journal::Journal;
use crate::methods::{self, Stage, Table};
use crate::rpc::RpcError;

/// Everything that methods act on. Shared by the threads of the RPC server.
pub(crate) struct App {
    pub(crate) registry: Registry,
    pub(crate) reactors: Vec<Reactor>,
    pub(crate) target: Target,
    pub(crate) initiator: Initiator,
    table: Table,
    /// Held by each method that changes something, so that two never interleave.
    changing: Mutex<()>,
    state: Mutex<State>,
    started: Condvar,
}

/// A reactor, and the thread that it is.
pub(crate) struct Reactor {
    pub(crate) remote: Remote,
    pub(crate) thread_id: u64,
}

/// What is remembered of what was configured.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) journal: Journal,
    /// Histograms that were asked for: the counts at that time, by device.
    pub(crate) histograms: BTreeMap<String, methods::HistogramStart>,
    /// Defaults of controllers that are attached.
    pub(crate) nvme: methods::NvmeOptions,
    stage: Stage,
    /// Applied by `framework_start_init`.
    pending: Option<Config>,
}

impl App {
    /// A program without devices, past its start-up unless `pending` is to be applied later.
    pub(crate) fn new(registry: Registry, reactors: Vec<Reactor>, pending: Option<Config>) -> Arc<App> {
        let stage = if pending.is_some() { Stage::Startup } else { Stage::Runtime };
        let state = Mutex::new(State { stage, pending, ..State::default() });
        let remotes: Vec<Remote> = reactors.iter().map(|reactor| reactor.remote.clone()).collect();
        let target = Target::new(registry.clone(), &remotes);
        let initiator = Initiator::new(registry.clone(), &remotes);
        let table = methods::table();
        Arc::new(App {
            registry,
            reactors,
            target,
            initiator,
            table,
            changing: Mutex::new(()),
            state,
            started: Condvar::new(),
        })
    }

    /// Calls a method.
    pub(crate) fn invoke(&self, name: &str, params: Value) -> Result<Value, RpcError> {
        let Some(method) = self.table.get(name) else { return Err(methods::not_found(name)) };
        let stage = self.stage();
        if !method.callable_in(stage) {
            let when = match stage {
                Stage::Startup => "after the framework is initialized (framework_start_init)",
                Stage::Runtime => "before the framework is initialized",
            };
            let message = format!("Method may only be called {when}");
            return Err(RpcError::new(RpcError::INVALID_STATE, message));
        }
        let _turn = method.changes().then(|| {
            // A method that panicked left what it changed as it was; the next may go on.
            self.changing.lock().unwrap_or_else(PoisonError::into_inner)
        });
        method.call(self, params)
    }

    /// Every method.
    pub(crate) fn table(&self) -> &Table {
        &self.table
    }

    /// What was configured.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How far start-up is.
    pub(crate) fn stage(&self) -> Stage {
        self.state().stage
    }

    /// Ends the start-up stage and gives the configuration that waited for that.
    pub(crate) fn finish_startup(&self) -> Option<Config> {
        let mut state = self.state();
        state.stage = Stage::Runtime;
        let pending = state.pending.take();
        drop(state);
        self.started.notify_all();
        pending
    }

    /// Waits until start-up has ended.
    pub(crate) fn wait_started(&self) {
        let mut state = self.state();
        while state.stage == Stage::Startup {
            state = self.started.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Stops listening and takes no further changes. Hosts are disconnected when the reactors stop, each
    /// after what it had under way has been answered.
    pub(crate) fn close_target(&self) {
        // Without reactors there is nobody left who listens.
        let _ = self.target.stop_listening();
        self.target.shutdown();
    }

    /// Removes every bdev, last made first; what is in flight completes.
    pub(crate) fn remove_devices(&self) {
        let names = self.state().journal.bdev_names();
        for name in names.iter().rev() {
            // Removed with the device below it, then.
            let _ = self.registry.unregister(name);
        }
        self.initiator.forget();
    }
}
