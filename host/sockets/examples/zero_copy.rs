//! Owned sends over the loopback interface, copied and not: what zero-copy costs where the kernel copies anyway.
//!
//! `zero_copy copy|zero-copy|adaptive BYTES SECONDS SENDER_CPU RECEIVER_CPU` sends buffers of BYTES, eight at a time, from
//! one CPU to another that reads and discards them, and prints the rate and how the data was sent. `copy` never uses
//! zero-copy, `zero-copy` always, and `adaptive` until the kernel has reported the default number of copies.

use std::io::Read;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use dma::{Arena, ArenaConfig, Buffer, Pool};
use os::{EventLoop, EventLoopConfig, SendPart};
use sockets::{Network, OwnedTransferConfig, OwnedTransfers, RejectedSend, Sockets, TransferEvent};

type ExampleError = Box<dyn std::error::Error + Send + Sync>;

/// Sends in flight.
const DEPTH: u64 = 8;
/// Not measured: the connection's windows grow meanwhile.
const RAMP: Duration = Duration::from_millis(200);

fn rejection(rejected: RejectedSend) -> std::io::Error {
    rejected.reason.into()
}

/// Reads until the stream ends.
fn discard(mut stream: TcpStream, cpu: u32) -> Result<(), ExampleError> {
    os::pin_thread_to(cpu)?;
    stream.set_nonblocking(true)?;
    let mut bytes = vec![0; 256 << 10];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Sends for a time; returns the sends per second.
fn send(
    (sockets, events): (&mut Sockets, &EventLoop),
    stream: TcpStream,
    (pool, bytes): (&Pool, usize),
    runtime: Duration,
) -> Result<f64, ExampleError> {
    let connection = sockets.add(stream.into())?;
    let part = |buffer: Buffer| SendPart::Buffer { buffer, start: 0, length: bytes as u32 };
    for tag in 0..DEPTH {
        let mut buffer = pool.take(bytes).ok_or("no memory for the buffers")?;
        buffer.as_mut_slice().fill(tag as u8 + 1);
        sockets.submit_send(connection, vec![part(buffer)], tag).map_err(rejection)?;
    }
    let (begun, mut from, mut sent) = (Instant::now(), None, 0u64);
    let (mut ready, mut done) = (Vec::new(), Vec::new());
    loop {
        events.turn();
        ready.clear();
        sockets.poll(&mut ready);
        sockets.reap_transfers(&mut done);
        for event in done.drain(..) {
            let TransferEvent::Sent { tag, result, parts, .. } = event else { continue };
            result.map_err(std::io::Error::from)?;
            sent += 1;
            sockets.submit_send(connection, parts, tag).map_err(rejection)?;
        }
        let now = Instant::now();
        match from {
            None if now - begun >= RAMP => (from, sent) = (Some(now), 0),
            Some(from) if now - from >= runtime => {
                sockets.close(connection);
                return Ok(sent as f64 / (now - from).as_secs_f64());
            }
            _ => {}
        }
    }
}

fn main() -> Result<(), ExampleError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [mode, bytes, seconds, sender, receiver] = &arguments[..] else {
        return Err("usage: zero_copy copy|zero-copy|adaptive BYTES SECONDS SENDER_CPU RECEIVER_CPU".into());
    };
    let base = OwnedTransferConfig { zero_copy_min_bytes: 0, ..OwnedTransferConfig::default() };
    let config = match mode.as_str() {
        "copy" => OwnedTransferConfig { zero_copy_send: false, ..base },
        "zero-copy" => OwnedTransferConfig { zero_copy_copies_max: u32::MAX, ..base },
        "adaptive" => base,
        _ => return Err("the mode is copy, zero-copy or adaptive".into()),
    };
    let (bytes, seconds): (usize, f64) = (bytes.parse()?, seconds.parse()?);
    if !(1..=dma::BUFFER_BYTES_MAX).contains(&bytes) {
        return Err(format!("1 to {} bytes can be sent", dma::BUFFER_BYTES_MAX).into());
    }
    let (sender, receiver): (u32, u32) = (sender.parse()?, receiver.parse()?);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let near = TcpStream::connect(listener.local_addr()?)?;
    let (far, _) = listener.accept()?;
    let reader = std::thread::spawn(move || discard(far, receiver));
    os::pin_thread_to(sender)?;
    let events = EventLoop::new(&EventLoopConfig::default())?;
    let pool = Pool::new(&Arena::new(ArenaConfig::default()));
    let mut sockets = Sockets::new(&events).with_owned_transfers(&events, &pool, &config)?;
    let runtime = Duration::from_secs_f64(seconds);
    let rate = send((&mut sockets, &events), near, (&pool, bytes), runtime)?;
    let stats = sockets.send_stats();
    drop(sockets);
    reader.join().map_err(|_| "the receiver panicked")??;
    println!(
        "{mode} {bytes}: {rate:.0} sends/s, {:.2} GB/s; zero-copied {} copied by the kernel {} by us {}",
        rate * bytes as f64 / 1e9,
        stats.zero_copied,
        stats.copied,
        stats.fallback
    );
    Ok(())
}
