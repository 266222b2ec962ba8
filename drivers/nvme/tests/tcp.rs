//! An association with a controller that is scripted PDU by PDU.
#![allow(clippy::unwrap_used)]

mod rig;

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use block_io::Status;
use nvme::{ControllerFailure, NvmeOpenError, Options, TcpAssociation, Uri};
use reactor::{Core, IdlePolicy, Reactor};
use rig::{options, reactor_config, until};
use wire_nvme::aer::AsyncEvent;
use wire_nvme::fabrics::{PropertyGet, fabrics_type};
use wire_nvme::feature::{AsyncEventConfiguration, FeatureId};
use wire_nvme::identify::{self, ControllerType, IdentifyController, oaes};
use wire_nvme::opcode::{AdminOpcode, FABRICS, FabricsType};
use wire_nvme::registers::{NvmeVersion, offset};
use wire_nvme::tcp::{
    C2hData, CAPSULE_CMD_SIZE, COMMON_SIZE, CapsuleCmd, CapsuleResp, FatalError, Framing, IC_SIZE, IcResp,
    PduType, SHORT_SIZE, TERM_MAX, TermReq,
};
use wire_nvme::{Cqe, Sqe};

/// CAP: 128 entries a queue, 15 s until ready, the NVM command set.
const CAP: u64 = 127 | 1 << 16 | 30 << 24 | 1 << 37;
/// Bits of CSTS.
const READY: u32 = 1;
const FATAL: u32 = 2;
/// An event of a reserved type.
const UNKNOWN_EVENT: u64 = 5;

/// What the controller answers.
struct Script {
    connect: Status,
    csts: u32,
    /// The completion of each Asynchronous Event Request; further ones stay outstanding.
    events: VecDeque<(Status, u64)>,
    /// It answers Set Features with C2HTermReq, and keeps the connection open.
    terminates: bool,
}

impl Default for Script {
    fn default() -> Self {
        Script { connect: Status::SUCCESS, csts: READY, events: VecDeque::new(), terminates: false }
    }
}

/// A controller of one connection, on a thread that ends with the connection. If it panics, the connection is closed.
struct ScriptedController {
    port: u16,
    /// Asynchronous Event Requests received.
    event_requests: Arc<AtomicUsize>,
}

impl ScriptedController {
    fn start(mut script: Script) -> ScriptedController {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let event_requests = Arc::new(AtomicUsize::new(0));
        let count = event_requests.clone();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; IC_SIZE]).unwrap();
            let mut response = [0; IC_SIZE];
            IcResp {
                controller_data_alignment_bytes: 4,
                header_digest: false,
                data_digest: false,
                h2c_data_max_bytes: 65_536,
            }
            .encode(&mut response);
            stream.write_all(&response).unwrap();
            // Until the host closes the connection.
            while let Some(sqe) = receive_command(&mut stream) {
                if sqe.opcode == AdminOpcode::AsyncEventRequest.to_wire() {
                    count.fetch_add(1, Ordering::Relaxed);
                }
                script.execute(&mut stream, &sqe);
            }
        });
        ScriptedController { port, event_requests }
    }

    async fn open(&self, core: &Core) -> Result<TcpAssociation, NvmeOpenError> {
        let uri = format!("nvme+tcp://127.0.0.1:{}/nqn.2026-11.io.ringbolt:scripted", self.port);
        let Ok(Uri::Tcp(uri)) = uri.parse() else { panic!("not a TCP URI") };
        // A retry, if there is one, is due at once.
        TcpAssociation::open(core, &uri, &Options { event_retry_ns: 0, ..options() }, 0).await
    }

    fn event_requests(&self) -> usize {
        self.event_requests.load(Ordering::Relaxed)
    }
}

fn receive_command(stream: &mut TcpStream) -> Option<Sqe> {
    let mut common = [0; COMMON_SIZE];
    stream.read_exact(&mut common).ok()?;
    let length = u32::from_le_bytes(*common[4..].first_chunk().unwrap()) as usize;
    let mut rest = vec![0; length - COMMON_SIZE];
    stream.read_exact(&mut rest).unwrap();
    let pdu = [&common[..], &rest].concat();
    Some(CapsuleCmd::decode(pdu.first_chunk::<CAPSULE_CMD_SIZE>().unwrap()))
}

impl Script {
    fn execute(&mut self, stream: &mut TcpStream, sqe: &Sqe) {
        let (status, result) = match AdminOpcode::from_wire(sqe.opcode) {
            _ if sqe.opcode == FABRICS => match fabrics_type(sqe).unwrap() {
                FabricsType::Connect => (self.connect, 1),
                FabricsType::PropertyGet => {
                    let get = PropertyGet::from_sqe(sqe).unwrap();
                    (Status::SUCCESS, if get.offset == offset::CAP { CAP } else { self.csts.into() })
                }
                _ => (Status::SUCCESS, 0),
            },
            Some(AdminOpcode::Identify) => {
                send_identify(stream, sqe.cid);
                (Status::SUCCESS, 0)
            }
            Some(AdminOpcode::SetFeatures) if self.terminates => {
                let mut pdu = [0; TERM_MAX];
                let fatal = FatalError::field(8);
                let length = TermReq { kind: PduType::C2hTermReq, fatal }.encode(&[], &mut pdu);
                return stream.write_all(&pdu[..length]).unwrap();
            }
            Some(AdminOpcode::AsyncEventRequest) => match self.events.pop_front() {
                Some(event) => event,
                None => return,
            },
            _ => (Status::SUCCESS, 0),
        };
        let mut pdu = [0; SHORT_SIZE];
        CapsuleResp { cqe: Cqe::new(sqe.cid, status).with_result(result) }.encode(&Framing::PLAIN, &mut pdu);
        stream.write_all(&pdu).unwrap();
    }
}

fn send_identify(stream: &mut TcpStream, cccid: u16) {
    let identity = IdentifyController {
        cntrltype: ControllerType::Io,
        oaes: oaes::NAMESPACE,
        ver: NvmeVersion::new(2, 0, 0),
        io_command_capsule_bytes: 64,
        io_response_capsule_bytes: 16,
        ..IdentifyController::default()
    };
    let mut page = [0; identify::SIZE];
    identity.encode(&mut page);
    let mut header = [0; SHORT_SIZE];
    C2hData { cccid, offset: 0, length: page.len() as u32, last: true, success: false }
        .encode(&Framing::PLAIN, &mut header);
    stream.write_all(&[&header[..], &page].concat()).unwrap();
}

fn on_core<F: Future<Output = ()> + 'static>(body: impl FnOnce(Core) -> F) {
    let reactor = Reactor::new(&reactor_config(IdlePolicy::Spin)).unwrap();
    let core = reactor.core();
    reactor.block_on(body(core));
}

/// Executes a command; the controller has then received everything that was sent before.
async fn round_trip(association: &mut TcpAssociation) {
    association.set_feature(FeatureId::TemperatureThreshold, 0).await.unwrap();
}

async fn next_event(association: &mut TcpAssociation) -> AsyncEvent {
    association.wait_event().await;
    association.next_event().unwrap_or_else(|| panic!("the association failed: {:?}", association.failure()))
}

#[test]
fn a_failed_connect_prints_the_meaning_that_its_status_has_for_connect() {
    on_core(async |core| {
        let connect = Status::CONNECT_INVALID_PARAMETERS.do_not_retry();
        let controller = ScriptedController::start(Script { connect, ..Script::default() });
        let error = controller.open(&core).await.err().unwrap();
        assert_eq!(error.to_string(), "Connect failed: Connect Invalid Parameters (01/82), do not retry");
    });
}

#[test]
fn a_fatal_status_while_enabling_is_a_controller_failure() {
    on_core(async |core| {
        let controller = ScriptedController::start(Script { csts: FATAL, ..Script::default() });
        let error = controller.open(&core).await.err().unwrap();
        assert!(matches!(error, NvmeOpenError::Failure(ControllerFailure::Fatal)), "{error}");
    });
}

/// The controller does not close the connection, and answers nothing more.
#[test]
fn a_terminated_connection_fails_at_once() {
    on_core(async |core| {
        let controller = ScriptedController::start(Script { terminates: true, ..Script::default() });
        let mut association = controller.open(&core).await.unwrap();
        association.set_feature(FeatureId::TemperatureThreshold, 0).await.unwrap_err();
        let failure = association.failure();
        assert!(matches!(failure, Some(ControllerFailure::Terminated(_))), "{failure:?}");
    });
}

#[test]
fn events_continue_after_an_unknown_event_and_after_an_error() {
    on_core(async |core| {
        let changed = AsyncEvent::NAMESPACE_CHANGED;
        let events = [
            (Status::SUCCESS, UNKNOWN_EVENT),
            (Status::COMMAND_INTERRUPTED, 0),
            (Status::SUCCESS, changed.to_result()),
        ];
        let controller = ScriptedController::start(Script { events: events.into(), ..Script::default() });
        let mut association = controller.open(&core).await.unwrap();
        association.enable_events(AsyncEventConfiguration::NAMESPACE).await.unwrap();
        assert_eq!(next_event(&mut association).await, changed);
        until(&core, "the next request is submitted", || controller.event_requests() == 4).await;
        round_trip(&mut association).await;
        assert_eq!(controller.event_requests(), 4, "one request is outstanding");
        drop(association);
    });
}

#[test]
fn an_event_request_that_must_not_be_retried_is_not() {
    on_core(async |core| {
        let events = [(Status::INVALID_OPCODE.do_not_retry(), 0)].into();
        let controller = ScriptedController::start(Script { events, ..Script::default() });
        let mut association = controller.open(&core).await.unwrap();
        association.enable_events(AsyncEventConfiguration::NAMESPACE).await.unwrap();
        until(&core, "the request is submitted", || controller.event_requests() >= 1).await;
        // The first response follows that of the request; the second follows a retry.
        round_trip(&mut association).await;
        round_trip(&mut association).await;
        assert_eq!(controller.event_requests(), 1);
        drop(association);
    });
}

#[test]
fn a_full_queue_of_events_delays_requests_and_loses_none() {
    on_core(async |core| {
        let events = vec![(Status::SUCCESS, AsyncEvent::NAMESPACE_CHANGED.to_result()); 40];
        let controller = ScriptedController::start(Script { events: events.into(), ..Script::default() });
        let mut association = controller.open(&core).await.unwrap();
        association.enable_events(AsyncEventConfiguration::NAMESPACE).await.unwrap();
        until(&core, "the queue fills up", || controller.event_requests() == 16).await;
        round_trip(&mut association).await;
        round_trip(&mut association).await;
        assert_eq!(controller.event_requests(), 16, "there is no room for more");
        for _ in 0..40 {
            assert_eq!(next_event(&mut association).await, AsyncEvent::NAMESPACE_CHANGED);
        }
        until(&core, "one request is outstanding", || controller.event_requests() == 41).await;
        drop(association);
    });
}
