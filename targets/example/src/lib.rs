//! A toy target: it echoes lines, each behind a prefix. A template for new targets; see CONTRIBUTING.md.
//!
//! The shell accepts connections and drives them on all cores. [`EchoConnection`] is one of them,
//! [`EchoCore`] the protocol's state of a core, and [`EchoModule`] what the control plane manages, with the
//! method `echo_set_prefix`.
#![forbid(unsafe_code)]

use std::convert::Infallible;
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;

use control::{Method, Module, RpcError};
use reactor::ReactorHandle;
use sockets::{ByteStream, StreamAddress};
use target_shell::{
    Accepted, CloseReason, GroupLimits, IoContext, MoreToRead, Protocol, ProtocolConnection, Publisher,
    ShellError, TargetConfig, TargetCores,
};

/// Maximum bytes of a line: a longer one is echoed in pieces.
const LINE_MAX: usize = 4096;
/// Bytes that wait to be sent; above it nothing is read, so that a peer that does not read costs little
/// memory.
const UNSENT_MAX: usize = 64 << 10;

/// The configuration, published to all cores.
#[derive(Default)]
pub struct EchoConfig {
    prefix: String,
}

impl TargetConfig for EchoConfig {}

/// State that the connections of a core share: none.
pub struct EchoCore;

/// A connection: the part of a line that has arrived, and what is not sent yet.
#[derive(Default)]
pub struct EchoConnection {
    line: Vec<u8>,
    unsent: Vec<u8>,
    draining: bool,
}

impl Protocol for EchoCore {
    const NAME: &'static str = "echo";
    type Config = EchoConfig;
    type Connection = EchoConnection;
    type Error = Infallible;

    fn accept(&mut self, _: Accepted, _: &Arc<EchoConfig>, _now_ns: u64) -> Option<EchoConnection> {
        Some(EchoConnection::default())
    }
}

impl ProtocolConnection<EchoCore> for EchoConnection {
    fn receive<S: ByteStream>(
        &mut self,
        stream: &mut S,
        scratch: &mut [u8],
        context: &mut IoContext<'_, EchoCore>,
    ) -> Result<MoreToRead, CloseReason<Infallible>> {
        if self.draining || self.unsent.len() > UNSENT_MAX {
            // The stream is blocked for writing: it becomes ready when the peer has read.
            return Ok(MoreToRead::No);
        }
        let count = CloseReason::check(stream.receive(&mut [IoSliceMut::new(scratch)]))?;
        for byte in &scratch[..count] {
            self.line.push(*byte);
            if *byte == b'\n' || self.line.len() == LINE_MAX {
                self.unsent.extend_from_slice(context.config.prefix.as_bytes());
                self.unsent.append(&mut self.line);
            }
        }
        // A full buffer means that there may be more; after fewer bytes, the stream becomes ready again.
        Ok(if count == scratch.len() { MoreToRead::Yes } else { MoreToRead::No })
    }

    fn flush<S: ByteStream>(&mut self, stream: &mut S) -> Result<(), CloseReason<Infallible>> {
        while !self.unsent.is_empty() {
            match CloseReason::check(stream.send(&[IoSlice::new(&self.unsent)]))? {
                0 => break,
                sent => drop(self.unsent.drain(..sent)),
            }
        }
        Ok(())
    }

    fn begin_drain(&mut self) {
        self.draining = true;
    }

    fn is_draining(&self) -> bool {
        self.draining
    }

    fn is_drained(&self) -> bool {
        self.unsent.is_empty()
    }
}

/// The target as a module of the control plane.
pub struct EchoModule {
    cores: TargetCores<EchoCore>,
    publisher: Publisher<EchoConfig>,
}

impl EchoModule {
    /// A target on these reactors. Returns the address that it listens on, too.
    pub fn new(
        reactors: &[ReactorHandle],
        address: &StreamAddress,
    ) -> Result<(Arc<EchoModule>, StreamAddress), ShellError> {
        let publisher = Publisher::default();
        let cores = TargetCores::start(reactors, &publisher, GroupLimits::default(), |_, _| EchoCore)?;
        let bound = cores.listen(address, 1)?;
        Ok((Arc::new(EchoModule { cores, publisher }), bound))
    }
}

impl Module for EchoModule {
    const NAME: &'static str = "echo";

    fn methods() -> Vec<Method<EchoModule>> {
        let method = Method::update("echo_set_prefix", set_prefix);
        vec![method.text("Sets what stands before each line, on all connections.", "true")]
    }

    fn drain(&self) {
        // What is left of connections closes when the reactors stop.
        _ = self.cores.drain();
    }
}

control::parameters! {
    struct Prefix {
        /// Text before each line
        prefix: String,
    }
}

fn set_prefix(module: &EchoModule, params: Prefix) -> Result<bool, RpcError> {
    let config = EchoConfig { prefix: params.prefix };
    module.publisher.change(Arc::new(config)).map_err(RpcError::internal)?;
    Ok(true)
}
