//! Threads that publish and find services.

use std::net::Ipv4Addr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use wire_mdns::DnsName;

use crate::socket::{MulticastSocket, PORT};
use crate::{Browser, FoundService, MdnsError, MdnsService, Responder};

/// Publishes services until it is dropped; then it withdraws them.
pub struct Publisher(#[expect(dead_code, reason = "dropping it ends the thread")] ServiceThread);

impl Publisher {
    /// Announces services and answers questions about them, each on the network of its address.
    ///
    /// # Errors
    /// The socket or the thread cannot be made.
    pub fn start(services: Vec<MdnsService>) -> Result<Publisher, MdnsError> {
        let mut addresses: Vec<Ipv4Addr> = services.iter().map(|service| service.address).collect();
        addresses.sort();
        addresses.dedup();
        let socket = MulticastSocket::open(&addresses)?;
        let seed = u64::from(std::process::id());
        let mut responder = Responder::new(services, seed);
        let thread = ServiceThread::start("mdns publish", move |stop| {
            let clock = Clock::start();
            loop {
                for (from, message) in responder.poll(clock.now_ms()) {
                    socket.send(from, &message);
                }
                if stop.wait(&socket, &clock, responder.deadline()) {
                    break;
                }
                socket.receive(|message, _| responder.receive(message, clock.now_ms()));
            }
            for (from, message) in responder.goodbye() {
                socket.send(from, &message);
            }
        });
        Ok(Publisher(thread?))
    }
}

/// Looks for instances of a service until it is dropped.
pub struct Discovery {
    kind: DnsName,
    // Dropping it ends the thread.
    _thread: ServiceThread,
}

impl Discovery {
    /// Looks for instances of a kind such as `_nvme-disc._tcp` on the networks of these addresses. The
    /// discovery's thread calls `found` for each instance, and again when it has another address. Loopback
    /// addresses are left out, unless the search is on the loopback network.
    ///
    /// # Errors
    /// The kind is not a name, or the socket or the thread cannot be made.
    pub fn start(
        kind: &str,
        addresses: Vec<Ipv4Addr>,
        mut found: impl FnMut(FoundService) + Send + 'static,
    ) -> Result<Discovery, MdnsError> {
        let mut browser = Browser::new(kind)?;
        let socket = MulticastSocket::open(&addresses)?;
        let is_loopback = addresses.iter().any(Ipv4Addr::is_loopback);
        let kind = browser.kind().clone();
        let thread = ServiceThread::start("mdns discovery", move |stop| {
            let clock = Clock::start();
            loop {
                if let Some(query) = browser.poll(clock.now_ms()) {
                    addresses.iter().for_each(|from| socket.send(*from, &query));
                }
                if stop.wait(&socket, &clock, Some(browser.deadline())) {
                    break;
                }
                socket.receive(|message, port| {
                    // Answers come from this port (RFC 6762, section 6).
                    if port != PORT {
                        return;
                    }
                    let services = browser.receive(message, clock.now_ms()).into_iter();
                    services
                        .filter(|service| is_loopback || !service.address.is_loopback())
                        .for_each(&mut found);
                });
            }
        });
        Ok(Discovery { kind, _thread: thread? })
    }

    /// Whether it looks for this kind: case is not significant, nor whether the domain is named.
    pub fn is_for(&self, kind: &str) -> bool {
        crate::service_kind(kind).is_ok_and(|kind| kind == self.kind)
    }
}

/// A thread, and the event that stops it.
struct ServiceThread {
    stop: Arc<StopEvent>,
    thread: Option<JoinHandle<()>>,
}

impl ServiceThread {
    fn start(name: &str, run: impl FnOnce(&StopEvent) + Send + 'static) -> std::io::Result<ServiceThread> {
        let stop = Arc::new(StopEvent(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?));
        let own = stop.clone();
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || run(&own))?;
        Ok(ServiceThread { stop, thread: Some(thread) })
    }
}

impl Drop for ServiceThread {
    fn drop(&mut self) {
        self.stop.set();
        if let Some(thread) = self.thread.take() {
            // A panic has already been printed.
            let _ = thread.join();
        }
    }
}

struct StopEvent(OwnedFd);

impl StopEvent {
    fn set(&self) {
        // A full counter is set, too.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Waits for a message, for a deadline or for the event; whether the event is set.
    fn wait(&self, socket: &MulticastSocket, clock: &Clock, deadline_ms: Option<u64>) -> bool {
        let timeout = deadline_ms.map(|deadline_ms| {
            let left = Duration::from_millis(deadline_ms.saturating_sub(clock.now_ms()));
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
        });
        let mut fds = [
            PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(socket.socket.as_fd(), PollFlags::IN),
        ];
        // An interruption by a signal is a wake-up.
        let _ = poll(&mut fds, timeout.as_ref());
        !fds[0].revents().is_empty()
    }
}

/// Milliseconds since the start of a thread.
struct Clock(Instant);

impl Clock {
    fn start() -> Clock {
        Clock(Instant::now())
    }

    fn now_ms(&self) -> u64 {
        self.0.elapsed().as_millis() as u64
    }
}
