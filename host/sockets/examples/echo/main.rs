//! Requests and responses of the sizes of NVMe/TCP over bare sockets: the upper bound of any target over loopback.
//!
//! `echo read|write DEPTH SECONDS CLIENT_CPU SERVER_CPU [MODE]` connects two threads, each on a CPU, over the loopback
//! interface. The client has DEPTH requests outstanding. Both ends spin on a non-blocking socket,
//! receive what has arrived, and send all that it leads to with one call. A read is a request of 72 bytes and a response
//! of 24 bytes and 4 KiB; a write is the reverse, with its data in the request. With `digest` the sender of the data
//! appends its CRC-32C, and the receiver checks it. With `readiness` both ends spin on the completions of an event loop,
//! which announce data that is then received; with `multishot` the kernel receives into buffers that it selects. There
//! is no protocol beyond that, and no data is copied except by the kernel. With `parts` and `parts+copy` both ends also do
//! what the framing of NVMe/TCP demands ([`pdus`]), and nothing else.

mod pdus;

use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use codec::{CRC32C_SIZE, crc32c};
use dma::{Arena, ArenaConfig, Pool};
use os::{EventLoop, EventLoopConfig};
use sockets::{
    ConnectionId, Network, NetworkEvent, OwnedTransferConfig, OwnedTransfers, SocketStream, Sockets,
    TransferEvent, TransferResult,
};

use pdus::{PduEnd, PduKind, PduStream};

type EchoError = Box<dyn std::error::Error + Send + Sync>;

/// Bytes of a command capsule and of a response without data.
const CAPSULE: usize = 72;
const RESPONSE: usize = 24;
const DATA: usize = 4096;
const DEPTH_MAX: usize = 1024;
/// Not measured: the connection's windows grow meanwhile.
const RAMP: Duration = Duration::from_millis(300);

/// The messages of one direction: a header, and data if it has any.
#[derive(Clone, Copy)]
struct MessageShape {
    header: usize,
    has_data: bool,
    digest: bool,
}

impl MessageShape {
    fn data_length(self) -> usize {
        if self.has_data { DATA } else { 0 }
    }

    fn length(self) -> usize {
        let digest = if self.has_data && self.digest { CRC32C_SIZE } else { 0 };
        self.header + self.data_length() + digest
    }

    /// Computes the digest of a message to send.
    fn seal(self, message: &mut [u8]) {
        if self.has_data && self.digest {
            let (head, digest) = message.split_at_mut(self.header + DATA);
            digest.copy_from_slice(&crc32c(&head[self.header..]).to_le_bytes());
        }
    }

    /// Whether the digest of a received message is correct.
    fn is_intact(self, message: &[u8]) -> bool {
        if !(self.has_data && self.digest) {
            return true;
        }
        let (head, digest) = message.split_at(self.header + DATA);
        crc32c(&head[self.header..]).to_le_bytes() == *digest
    }
}

/// How an end learns of data.
#[derive(Clone, Copy, PartialEq)]
enum Arrival {
    /// It asks the socket.
    Spin,
    /// It reads the event loop's completions, and then the socket.
    Readiness,
    /// It reads the event loop's completions, which have the data.
    Multishot,
}

/// A socket, and how it is read.
enum EchoLink {
    Bare(TcpStream),
    Events(Box<EventLink>),
}

/// A socket on an event loop.
struct EventLink {
    events: EventLoop,
    sockets: Sockets,
    connection: ConnectionId,
    ready: Vec<NetworkEvent<SocketStream>>,
    arrived: Vec<TransferEvent>,
}

impl EchoLink {
    fn new(stream: TcpStream, arrival: Arrival) -> Result<EchoLink, EchoError> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        if arrival == Arrival::Spin {
            return Ok(EchoLink::Bare(stream));
        }
        let events = EventLoop::new(&EventLoopConfig::default())?;
        let pool = Pool::new(&Arena::new(ArenaConfig::default()));
        let mut sockets =
            Sockets::new(&events).with_owned_transfers(&events, &pool, &OwnedTransferConfig::default())?;
        let connection = sockets.add(stream.into())?;
        if arrival == Arrival::Multishot {
            if !sockets.transfer_capabilities().multishot_receive {
                return Err("the kernel has no multishot receive".into());
            }
            sockets.start_receive(connection)?;
        }
        let (ready, arrived) = (Vec::new(), Vec::new());
        Ok(EchoLink::Events(Box::new(EventLink { events, sockets, connection, ready, arrived })))
    }

    /// As `read(2)` of a non-blocking socket. Multishot receives leave `into` as it is: the data is in the kernel's
    /// buffers.
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        match self {
            EchoLink::Bare(stream) => stream.read(into),
            EchoLink::Events(link) => link.read(into),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self {
            EchoLink::Bare(stream) => stream.write(bytes),
            EchoLink::Events(link) => result(link.sockets.send(link.connection, &[IoSlice::new(bytes)])),
        }
    }
}

impl EventLink {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        self.events.turn();
        self.ready.clear();
        self.sockets.poll(&mut self.ready);
        let mut count = 0;
        if self.sockets.reap_transfers(&mut self.arrived) > 0 {
            for event in self.arrived.drain(..) {
                match event {
                    TransferEvent::Received { buffer, .. } => count += buffer.len(),
                    _ => return Ok(0),
                }
            }
        } else if !self.ready.is_empty() {
            return result(self.sockets.receive(self.connection, &mut [IoSliceMut::new(into)]));
        }
        if count > 0 { Ok(count) } else { Err(ErrorKind::WouldBlock.into()) }
    }
}

fn result(transfer: TransferResult) -> std::io::Result<usize> {
    match transfer {
        TransferResult::Bytes(count) => Ok(count),
        TransferResult::Blocked => Err(ErrorKind::WouldBlock.into()),
        TransferResult::Closed => Ok(0),
        TransferResult::Failed(kind) => Err(kind.into()),
    }
}

/// One end of the connection.
struct EchoEnd {
    link: EchoLink,
    incoming: MessageShape,
    outgoing: MessageShape,
    received: Vec<u8>,
    /// Bytes of `received` that belong to a message that has not arrived whole.
    partial: usize,
    to_send: Vec<u8>,
}

impl EchoEnd {
    fn new(
        link: EchoLink,
        incoming: MessageShape,
        outgoing: MessageShape,
        depth: usize,
    ) -> Result<EchoEnd, EchoError> {
        let received = vec![0; depth * incoming.length()];
        // Data other than zeros.
        let to_send = (0..depth * outgoing.length()).map(|at| at as u8).collect();
        Ok(EchoEnd { link, incoming, outgoing, received, partial: 0, to_send })
    }
}

/// What the client and the server do, whatever they look at.
trait MessageEnd {
    /// Sends the first requests.
    fn start(&mut self, depth: usize) -> Result<(), EchoError>;

    /// Receives what has arrived, and returns the number of complete messages; `None` at the end of the stream.
    fn receive(&mut self) -> Result<Option<usize>, EchoError>;

    /// Sends as many messages as were received, with one call, or as many as the socket's buffer takes.
    fn answer(&mut self, count: usize) -> Result<(), EchoError>;
}

impl MessageEnd for EchoEnd {
    fn start(&mut self, depth: usize) -> Result<(), EchoError> {
        self.answer(depth)
    }

    /// Does not look at data without digest.
    fn receive(&mut self) -> Result<Option<usize>, EchoError> {
        let count = match received(self.link.read(&mut self.received[self.partial..]))? {
            Some(count) if count > 0 => count,
            nothing => return Ok(nothing),
        };
        let length = self.incoming.length();
        let available = self.partial + count;
        let messages = available / length;
        for message in self.received[..messages * length].chunks_exact(length) {
            if !self.incoming.is_intact(message) {
                return Err("a digest is wrong".into());
            }
        }
        self.received.copy_within(messages * length..available, 0);
        self.partial = available - messages * length;
        Ok(Some(messages))
    }

    fn answer(&mut self, count: usize) -> Result<(), EchoError> {
        let length = self.outgoing.length();
        let bytes = &mut self.to_send[..count * length];
        bytes.chunks_exact_mut(length).for_each(|message| self.outgoing.seal(message));
        let mut rest = &*bytes;
        while !rest.is_empty() {
            match self.link.write(rest) {
                Ok(count) => rest = &rest[count..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// The bytes of a receive: 0 if there were none, `None` at the end of the stream.
fn received(result: std::io::Result<usize>) -> Result<Option<usize>, EchoError> {
    match result {
        Ok(0) => Ok(None),
        Ok(count) => Ok(Some(count)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(Some(0)),
        Err(error) if error.kind() == ErrorKind::ConnectionReset => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Answers requests until the client closes the connection.
fn serve(mut end: impl MessageEnd, failed: &AtomicBool) -> Result<(), EchoError> {
    while let Some(count) = end.receive()? {
        if count > 0 {
            end.answer(count)?;
        }
        if failed.load(Ordering::Relaxed) {
            return Ok(());
        }
    }
    Ok(())
}

/// Returns the responses per second.
fn load(
    end: &mut impl MessageEnd,
    depth: usize,
    runtime: Duration,
    failed: &AtomicBool,
) -> Result<f64, EchoError> {
    let begun = Instant::now();
    let (mut measured_from, mut responses, mut polls) = (None, 0usize, 0u32);
    end.start(depth)?;
    loop {
        let Some(count) = end.receive()? else { return Err("the server has closed the connection".into()) };
        responses += count;
        if count > 0 {
            end.answer(count)?;
        }
        polls = polls.wrapping_add(1);
        if !polls.is_multiple_of(64) {
            continue;
        }
        if failed.load(Ordering::Relaxed) {
            return Err("the server has failed".into());
        }
        let now = Instant::now();
        match measured_from {
            None if now - begun >= RAMP => (measured_from, responses) = (Some(now), 0),
            Some(from) if now - from >= runtime => {
                return Ok(responses as f64 / (now - from).as_secs_f64());
            }
            _ => {}
        }
    }
}

fn main() -> Result<(), EchoError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (operation, depth, seconds, client_cpu, server_cpu, rest) = match &arguments[..] {
        [operation, depth, seconds, client, server, rest @ ..] => {
            (operation, depth, seconds, client, server, rest)
        }
        _ => return Err("usage: echo read|write DEPTH SECONDS CLIENT_CPU SERVER_CPU [MODE]".into()),
    };
    let depth: usize = depth.parse()?;
    if !(1..=DEPTH_MAX).contains(&depth) {
        return Err(format!("a depth is 1 to {DEPTH_MAX}").into());
    }
    let runtime = Duration::from_secs_f64(seconds.parse()?);
    let (client_cpu, server_cpu): (u32, u32) = (client_cpu.parse()?, server_cpu.parse()?);
    let mode = rest.first().map_or("", String::as_str);
    let (is_pdus, copies) = (mode.starts_with("parts"), mode == "parts+copy");
    let arrival = match mode {
        "" | "digest" | "parts" | "parts+copy" => Arrival::Spin,
        "readiness" => Arrival::Readiness,
        "multishot" => Arrival::Multishot,
        _ => return Err("the mode is digest, readiness, multishot, parts or parts+copy".into()),
    };
    let (is_read, digest) = (operation == "read", mode == "digest");
    let request = MessageShape { header: CAPSULE, has_data: !is_read, digest };
    let response = MessageShape { header: RESPONSE, has_data: is_read, digest };

    let cpus = [client_cpu, server_cpu];
    let rate = if is_pdus {
        let requests = PduStream { kind: pdus::COMMAND, shape: request };
        let responses = PduStream { kind: PduKind::answer(response), shape: response };
        exchange(cpus, depth, runtime, |stream, is_client| {
            let (from, to) = if is_client { (responses, requests) } else { (requests, responses) };
            PduEnd::new(stream, from, to, depth, copies)
        })?
    } else {
        exchange(cpus, depth, runtime, |stream, is_client| {
            let (from, to) = if is_client { (response, request) } else { (request, response) };
            EchoEnd::new(EchoLink::new(stream, arrival)?, from, to, depth)
        })?
    };
    println!("{operation} at depth {depth} over bare sockets: {rate:.0} messages/s");
    Ok(())
}

/// Connects a client and a server, each made from its socket. Returns the responses per second.
fn exchange<E: MessageEnd>(
    [client_cpu, server_cpu]: [u32; 2],
    depth: usize,
    runtime: Duration,
    make: impl Fn(TcpStream, bool) -> Result<E, EchoError> + Sync,
) -> Result<f64, EchoError> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let client = TcpStream::connect(listener.local_addr()?)?;
    let (server, _) = listener.accept()?;
    let failed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (failed, make) = (&failed, &make);
        let server = scope.spawn(move || {
            os::pin_thread_to(server_cpu)?;
            let served = make(server, false).and_then(|end| serve(end, failed));
            failed.store(served.is_err(), Ordering::Relaxed);
            served
        });
        os::pin_thread_to(client_cpu)?;
        let mut end = make(client, true)?;
        let rate = load(&mut end, depth, runtime, failed);
        failed.store(true, Ordering::Relaxed);
        drop(end);
        server.join().map_err(|_| "the server panicked")??;
        rate
    })
}
