//! The toy target, managed by its method and used by a client that knows only sockets.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;

use control::ControlPlane;
use control::json::json;
use reactor::{IdlePolicy, ReactorConfig, Reactors};

#[test]
fn lines_come_back_behind_the_prefix() {
    let config = ReactorConfig { idle: IdlePolicy::Sleep, pin: false, ..ReactorConfig::default() };
    let reactors = Reactors::start(&config).unwrap();
    let any_port = "127.0.0.1:0".parse().unwrap();
    let (module, address) = target_example::EchoModule::new(reactors.handles(), &any_port).unwrap();
    let plane = ControlPlane::builder(Vec::new()).module(&module).start(None).unwrap();
    let mut client = TcpStream::connect(address.tcp().unwrap()).unwrap();
    let mut lines = BufReader::new(client.try_clone().unwrap()).lines();
    for (prefix, line) in [("", "hello"), ("> ", ""), ("> ", "world")] {
        plane.invoke("echo_set_prefix", json!({ "prefix": prefix })).unwrap();
        writeln!(client, "{line}").unwrap();
        assert_eq!(lines.next().unwrap().unwrap(), format!("{prefix}{line}"));
    }
    // The end of the program disconnects its clients while the reactors run.
    plane.drain();
    assert!(lines.next().is_none(), "the connection was drained and closed");
    assert!(TcpStream::connect(address.tcp().unwrap()).is_err(), "nothing listens any more");
    reactors.stop();
}
