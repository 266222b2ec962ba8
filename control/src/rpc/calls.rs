//! The calls of one connection: started in order, executed beside each other, their responses sent one at a
//! time.

use std::io::{self, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use serde_json::Value;

use super::protocol;
use crate::RpcError;

/// Most calls of a connection that run at the same time, each on a thread. Beyond it, requests stay in the
/// socket.
const CALLS_MAX: usize = 16;
/// How long the next call waits for one to end. A call that only changes or reads the configuration ends
/// within it, and so is seen by the next; what waits for a device or a peer takes longer.
const CALL_HEADSTART: Duration = Duration::from_millis(20);
/// Most of a batch's responses that wait in memory for its end. What comes then is sent as it is made, and
/// keeps the responses of other calls waiting.
const BATCH_BYTES_MAX: usize = 1 << 20;

/// Most bytes of responses that wait for the peer to read while another call is started. Those that run then
/// make theirs.
const UNSENT_BYTES_MAX: usize = 4 << 20;

type Invoke = Box<dyn Fn(&str, Value) -> Result<Value, RpcError> + Send + Sync>;
/// Called when the first of some calls begins and when the last has ended; returns `false` if the connection
/// was replaced.
type SetBusy = Box<dyn Fn(bool) -> bool + Send + Sync>;

/// The calls of a connection. One thread calls [`start`](Self::start) for each frame, and
/// [`finish`](Self::finish) at the end.
pub(super) struct ConnectionCalls {
    /// Locked for each response.
    stream: Mutex<UnixStream>,
    invoke: Invoke,
    set_busy: SetBusy,
    state: Mutex<CallState>,
    /// A call has ended, or a frame has come.
    changed: Condvar,
}

#[derive(Default)]
struct CallState {
    /// The frame to execute next; it is taken by a thread before the next one comes.
    frame: Option<Vec<u8>>,
    /// Frames that were started, and that have ended.
    started: u64,
    ended: u64,
    /// Threads, and those that wait for a frame.
    threads: usize,
    waiting: usize,
    /// Bytes of responses that are being sent, or wait for those.
    unsent_bytes: usize,
    /// The highest number of a frame that has ended.
    last_ended: u64,
    /// No more frames come, or the connection has failed.
    is_closed: bool,
}

impl ConnectionCalls {
    pub(super) fn new(stream: UnixStream, invoke: Invoke, set_busy: SetBusy) -> Arc<ConnectionCalls> {
        Arc::new(ConnectionCalls {
            stream: Mutex::new(stream),
            invoke,
            set_busy,
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Starts the calls of a frame, and returns when they have ended or have taken [`CALL_HEADSTART`].
    /// Returns `false` if no more are to come.
    pub(super) fn start(self: &Arc<Self>, frame: Vec<u8>) -> bool {
        let mut state = self.lock();
        while !state.may_start() && !state.is_closed {
            state = sync::wait(&self.changed, state);
        }
        if state.is_closed || (state.running() == 0 && !(self.set_busy)(true)) {
            return false;
        }
        state.started += 1;
        let number = state.started;
        state.frame = Some(frame);
        if state.waiting == 0 {
            let calls = self.clone();
            let thread = std::thread::Builder::new().name("rpc-call".to_string());
            match thread.spawn(move || calls.execute_all()) {
                Ok(_) => state.threads += 1,
                Err(_) => {
                    // No more threads: on this one.
                    let frame = state.frame.take().unwrap_or_default();
                    drop(state);
                    self.execute(&frame);
                    self.lock().end(number, &self.set_busy);
                    return !self.lock().is_closed;
                }
            }
        } else {
            self.changed.notify_all();
        }
        let taken_and_ended = |state: &mut CallState| {
            let is_done = state.frame.is_none() && (state.last_ended >= number || state.is_closed);
            is_done.then_some(())
        };
        drop(state);
        if reactor::blocking::wait_until(&self.state, &self.changed, CALL_HEADSTART, taken_and_ended).is_ok()
        {
            return !self.lock().is_closed;
        }
        // It has begun at least: so do calls start in order.
        let mut state = self.lock();
        while state.frame.is_some() {
            state = sync::wait(&self.changed, state);
        }
        !state.is_closed
    }

    /// Waits for the calls that run; their responses are sent.
    pub(super) fn finish(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        self.changed.notify_all();
        while state.threads > 0 {
            state = sync::wait(&self.changed, state);
        }
    }

    /// Sends a response, or the end of the stream's parsing.
    pub(super) fn send(&self, text: &[u8]) -> io::Result<()> {
        sync::lock(&self.stream).write_all(text)
    }

    /// A thread's life: executes frames until the connection ends.
    fn execute_all(&self) {
        let mut state = self.lock();
        loop {
            if let Some(frame) = state.frame.take() {
                let number = state.started;
                drop(state);
                self.changed.notify_all();
                self.execute(&frame);
                state = self.lock();
                state.end(number, &self.set_busy);
                self.changed.notify_all();
            } else if state.is_closed || state.waiting > 0 {
                // One waits for the next frame already.
                break;
            } else {
                state.waiting += 1;
                state = sync::wait(&self.changed, state);
                state.waiting -= 1;
            }
        }
        state.threads -= 1;
        drop(state);
        self.changed.notify_all();
    }

    fn execute(&self, frame: &[u8]) {
        let mut response = ResponseWriter { calls: self, text: Vec::new(), stream: None };
        let mut send = |text: &[u8]| response.write(text);
        let handled =
            protocol::handle_frame(frame, &mut |method, params| (self.invoke)(method, params), &mut send);
        let sent = handled.and_then(|is_json| response.end().map(|()| is_json));
        // Behind what is not JSON no next call can be found; an error means that the peer has gone, or does
        // not read.
        let how = match sent {
            Ok(true) => return,
            Ok(false) => Shutdown::Read,
            Err(_) => Shutdown::Both,
        };
        self.lock().is_closed = true;
        let _ = sync::lock(&self.stream).shutdown(how);
    }

    fn lock(&self) -> MutexGuard<'_, CallState> {
        sync::lock(&self.state)
    }
}

impl CallState {
    fn running(&self) -> usize {
        (self.started - self.ended) as usize
    }

    /// Whether another call may run beside those that do.
    fn may_start(&self) -> bool {
        self.running() < CALLS_MAX && self.unsent_bytes <= UNSENT_BYTES_MAX
    }

    fn end(&mut self, number: u64, set_busy: &SetBusy) {
        self.ended += 1;
        self.last_ended = self.last_ended.max(number);
        if self.running() == 0 && !set_busy(false) {
            self.is_closed = true;
        }
    }
}

/// The responses to a frame, which are sent without others in between.
struct ResponseWriter<'a> {
    calls: &'a ConnectionCalls,
    /// What is not sent yet.
    text: Vec<u8>,
    /// Locked from the first write on.
    stream: Option<MutexGuard<'a, UnixStream>>,
}

impl ResponseWriter<'_> {
    fn write(&mut self, text: &[u8]) -> io::Result<()> {
        if let Some(stream) = &mut self.stream {
            return stream.write_all(text);
        }
        self.text.extend_from_slice(text);
        if self.text.len() > BATCH_BYTES_MAX { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        let text = std::mem::take(&mut self.text);
        self.calls.lock().unsent_bytes += text.len();
        let stream = self.stream.get_or_insert_with(|| sync::lock(&self.calls.stream));
        let sent = stream.write_all(&text);
        self.calls.lock().unsent_bytes -= text.len();
        self.calls.changed.notify_all();
        sent
    }

    fn end(mut self) -> io::Result<()> {
        if self.text.is_empty() { Ok(()) } else { self.flush() }
    }
}
