//! The target.

use bdev::Registry;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::cli::Serve;
use crate::config::Config;
use crate::failure::Failure;
use crate::machine::Machine;
use crate::rpc::server::Server;
use crate::rpc::socket::ListenSocket;
use crate::say::say;
use crate::state::App;

pub(crate) fn run(options: Serve) -> Result<(), Failure> {
    // What needs no machine is checked before anything is started.
    let config = options.config.as_deref().map(Config::read).transpose()?;
    // Before the reactors: every thread inherits what is blocked and handled here.
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(Failure::machine)?;
    let shared = config.as_ref().is_some_and(Config::shares_memory);
    let machine = Machine::start_with(&options.machine, options.cores.as_deref(), 1, shared)?;
    machine.describe()?.iter().for_each(|line| say!("{line}"));
    let socket = ListenSocket::bind(&options.rpc_socket).map_err(Failure::machine)?;

    let pending = options.wait_for_rpc.then(|| config.clone().unwrap_or_default());
    let app = App::new(Registry::new(), machine.reactors()?, pending);
    if let (Some(config), false) = (&config, options.wait_for_rpc) {
        config.apply(&app).map_err(|error| Failure::config(error.message))?;
    }
    for subsystem in app.target.subsystems().iter().filter(|subsystem| !subsystem.discovery) {
        for listener in &subsystem.listeners {
            say!("listening: {} {}:{} {}", listener.trtype, listener.traddr, listener.trsvcid, subsystem.nqn);
        }
    }
    say!("rpc: {}", options.rpc_socket.display());
    let server = Server::start(app.clone(), socket).map_err(Failure::machine)?;
    say!("ready");

    let signal = signals.forever().next();
    let name = signal.and_then(signal_hook::low_level::signal_name).unwrap_or("the end");
    say!("{name}: finishing what is in flight");
    drop(server);
    // Connections first: each ends once what it had under way is answered, and gives its devices back.
    app.close_target();
    machine.reactors.stop();
    app.remove_devices();
    Ok(())
}
