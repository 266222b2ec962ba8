//! `ringbolt serve`: the NVMe-oF and NBD targets.

use bdev::Registry;
use control::{ConfigFile, ListenSocket, RpcServer};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::app::{self, App};
use crate::cli::Serve;
use crate::command_error::CommandError;
use crate::console::stdout_line;
use crate::reactor_runtime::ReactorRuntime;

pub(crate) fn run(options: Serve) -> Result<(), CommandError> {
    // The configuration is checked before anything is started.
    control::logging::init();
    let catalog = app::catalog();
    let config = options.config.as_deref().map(|path| ConfigFile::read(path, &catalog)).transpose();
    let config = config.map_err(CommandError::config)?;
    // Before the reactors: every thread inherits the signal mask and handlers set here.
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(CommandError::environment)?;
    let shared = config.as_ref().is_some_and(app::needs_shared_memory);
    let runtime = ReactorRuntime::start_with(&options.reactor_options, options.cores.as_deref(), 1, shared)?;
    runtime.describe()?.iter().for_each(|line| stdout_line!("{line}"));
    let socket = ListenSocket::bind(&options.rpc_socket).map_err(CommandError::environment)?;

    let pending = options.wait_for_rpc.then(|| config.clone().unwrap_or_default());
    let app = App::start(Registry::new(), runtime.reactors()?, pending).map_err(CommandError::environment)?;
    if let (Some(config), false) = (&config, options.wait_for_rpc) {
        config.apply(&app.control).map_err(|error| CommandError::config(error.message))?;
    }
    for subsystem in app.target().subsystems().iter().filter(|subsystem| !subsystem.discovery) {
        for listener in &subsystem.listeners {
            stdout_line!(
                "listening: {} {}:{} {}",
                listener.trtype,
                listener.traddr,
                listener.trsvcid,
                subsystem.nqn
            );
        }
    }
    for export in app.nbd().configured() {
        stdout_line!("listening: NBD {}", export.uri());
    }
    stdout_line!("rpc: {}", options.rpc_socket.display());
    let server = RpcServer::start(app.control.clone(), socket).map_err(CommandError::environment)?;
    stdout_line!("ready");

    let signal = signals.forever().next();
    let name = signal.and_then(signal_hook::low_level::signal_name).unwrap_or("stopped");
    stdout_line!("{name}: completing I/O in flight");
    drop(server);
    // Connections first: each closes after its commands in flight have completed, and releases its bdevs.
    app.control.drain();
    runtime.reactors.stop();
    app.control.stop();
    Ok(())
}
