//! Connecting to a controller: queues, initialisation, identification.

use std::net::SocketAddr;

use memory::Buffer;
use net::{Event, Network, Sockets};
use reactor::Core;
use ring::{Op, Request, Status, Tag};
use wire_nvme::admin::{Identify, SetFeatures};
use wire_nvme::fabrics::{
    CNTLID_DYNAMIC, CONNECT_DATA_SIZE, Connect, ConnectAttributes, ConnectData, Connected, Nqn, PropertyGet,
    PropertySet,
};
use wire_nvme::identify::{self, IdentifyController, IdentifyNamespace};
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::registers::{Capabilities, Configuration, ControllerStatus, offset};
use wire_nvme::{Cqe, Sqe, feature};

use super::queue::{self, Data, Queue};
use crate::error::OpenError;
use crate::options::Options;
use crate::uri::TcpUri;

/// Entries of the admin queue: what Linux uses.
pub(super) const ADMIN_DEPTH: u32 = 32;
/// Bytes read at a time beyond what goes into place directly: eleven responses of 4 KiB, which are
/// still in the L2 cache when they are copied on.
pub(super) const SCRATCH_BYTES: usize = 48 << 10;

/// A connected controller: its admin queue, one I/O queue, and the network that both are on.
pub(crate) struct Controller {
    pub(crate) network: Sockets,
    pub(crate) scratch: Vec<u8>,
    pub(crate) admin: Queue,
    pub(crate) io: Option<Queue>,
    pub(crate) keep_alive_ms: u32,
    core: Core,
    timeout_ns: u64,
}

/// What identification told.
pub(crate) struct Facts {
    pub(crate) blocks: u64,
    pub(crate) block_size: u32,
    pub(crate) transfer_max_bytes: u32,
    pub(crate) write_zeroes: bool,
    pub(crate) unmap: bool,
}

impl Facts {
    pub(crate) fn new(
        nsid: u32,
        namespace: &IdentifyNamespace,
        mdts: u8,
        oncs: u16,
    ) -> Result<Facts, OpenError> {
        if namespace.nsze == 0 {
            return Err(OpenError::NoNamespace(nsid));
        }
        let Some(format) = namespace.formats.get(usize::from(namespace.format)) else {
            return Err(OpenError::Format(nsid, "it is in a format that it does not list"));
        };
        if format.metadata_bytes > 0 {
            return Err(OpenError::Format(nsid, "metadata"));
        }
        if !(9..=16).contains(&format.data_log2) {
            return Err(OpenError::Format(nsid, "blocks under 512 bytes or over 64 KiB"));
        }
        // MDTS counts in pages of CAP.MPSMIN, which is 4 KiB over fabrics; 0 is no limit.
        let transfer_max_bytes = match mdts {
            0 => memory::BUFFER_BYTES_MAX as u32,
            mdts => 4096u32.checked_shl(mdts.into()).unwrap_or(u32::MAX).min(memory::BUFFER_BYTES_MAX as u32),
        };
        Ok(Facts {
            blocks: namespace.nsze,
            block_size: 1 << format.data_log2,
            transfer_max_bytes,
            write_zeroes: oncs & identify::oncs::WRITE_ZEROES != 0,
            unmap: oncs & identify::oncs::DATASET_MANAGEMENT != 0,
        })
    }
}

impl Controller {
    pub(crate) async fn open(
        core: &Core,
        uri: &TcpUri,
        address: SocketAddr,
        options: &Options,
    ) -> Result<(Controller, Facts), OpenError> {
        let mut network = Sockets::new(core.events()).spinning(core.spins());
        let admin = connect(&mut network, address, ADMIN_DEPTH, uri)?;
        let mut controller = Controller {
            network,
            scratch: vec![0; SCRATCH_BYTES],
            admin,
            io: None,
            keep_alive_ms: options.keep_alive_ms,
            core: core.clone(),
            timeout_ns: options.timeout_ns,
        };
        controller.initialize(false).await?;
        let cntlid = controller.connect_queue(uri, options, 0, ADMIN_DEPTH, CNTLID_DYNAMIC).await?;
        let entries_max = controller.enable().await?;
        let identity = controller.identify_controller().await?;
        controller.request_queues().await?;

        let depth = options.queue_depth.clamp(1, (entries_max - 1).min(queue::DEPTH_MAX - 1));
        let io = connect(&mut controller.network, address, depth + 1, uri)?;
        controller.io = Some(io);
        controller.initialize(true).await?;
        controller.connect_queue(uri, options, 1, depth + 1, cntlid).await?;
        let capsule = identity.io_command_capsule_bytes.saturating_sub(wire_nvme::sqe::SIZE as u32);
        if let Some(io) = &mut controller.io {
            io.set_in_capsule_max(capsule);
        }
        let facts = controller.identify_namespace(uri.nsid, &identity).await?;
        Ok((controller, facts))
    }

    /// Takes in what arrived on either connection; returns whether anything may have.
    pub(crate) fn poll(&mut self, events: &mut Vec<Event<std::net::TcpStream>>) {
        self.network.poll(events);
        for event in events.drain(..) {
            let Event::Ready(id) = event else { continue };
            let queue = match &mut self.io {
                Some(io) if io.connection() == id => io,
                _ if self.admin.connection() == id => &mut self.admin,
                _ => continue,
            };
            while queue.receive(&mut self.network, &mut self.scratch) {}
        }
    }

    fn queue(&mut self, io: bool) -> &mut Queue {
        match &mut self.io {
            Some(queue) if io => queue,
            _ => &mut self.admin,
        }
    }

    /// Waits until ICReq is answered.
    async fn initialize(&mut self, io: bool) -> Result<(), OpenError> {
        let deadline_ns = sys::clock::now_ns() + self.timeout_ns;
        let mut events = Vec::new();
        loop {
            self.poll(&mut events);
            if let Some(failure) = self.queue(io).failure {
                return Err(failure.into());
            }
            if self.queue(io).is_ready() {
                return Ok(());
            }
            self.wait("ICReq", deadline_ns).await?;
        }
    }

    async fn wait(&mut self, what: &'static str, deadline_ns: u64) -> Result<(), OpenError> {
        let now_ns = sys::clock::now_ns();
        if now_ns >= deadline_ns {
            return Err(OpenError::Timeout(what));
        }
        if self.network.is_pending() {
            self.core.sleep_ns(0).await;
            return Ok(());
        }
        let event = std::pin::pin!(self.core.next_event());
        let timeout = std::pin::pin!(self.core.sleep_ns(deadline_ns - now_ns));
        first(event, timeout).await;
        Ok(())
    }

    /// Executes one command and waits for its completion.
    async fn execute(
        &mut self,
        what: &'static str,
        io: bool,
        sqe: Sqe,
        buffer: Option<Buffer>,
        small: &[u8],
    ) -> Result<(Cqe, Option<Buffer>), OpenError> {
        let data = buffer.as_ref().map_or(Data::None, |buffer| Data::In(buffer.len() as u32));
        let mut request = Request::new(Tag(u64::MAX), Op::Flush, 0, 0);
        request.buffer = buffer;
        self.queue(io).submit(sqe, request, data, small);
        let deadline_ns = sys::clock::now_ns() + self.timeout_ns;
        let mut events = Vec::new();
        loop {
            let (network, queue) = match &mut self.io {
                Some(queue) if io => (&mut self.network, queue),
                _ => (&mut self.network, &mut self.admin),
            };
            queue.flush(network);
            self.poll(&mut events);
            let queue = self.queue(io);
            if let Some(finished) = queue.finished().pop() {
                if let Some(failure) = queue.failure {
                    return Err(failure.into());
                }
                if !finished.cqe.status.is_success() {
                    return Err(OpenError::Command(what, finished.cqe.status));
                }
                return Ok((finished.cqe, finished.request.buffer));
            }
            self.wait(what, deadline_ns).await?;
        }
    }

    async fn connect_queue(
        &mut self,
        uri: &TcpUri,
        options: &Options,
        qid: u16,
        entries: u32,
        cntlid: u16,
    ) -> Result<u16, OpenError> {
        let hostnqn = options.hostnqn.clone().unwrap_or_else(|| host_nqn(&options.host_id));
        let mut data = [0; CONNECT_DATA_SIZE];
        ConnectData { host_id: options.host_id, cntlid, subnqn: uri.subnqn.clone(), hostnqn }
            .encode(&mut data);
        let connect = Connect {
            record_format: 0,
            qid,
            queue_entries: entries,
            // SQHD means nothing to a queue whose slots bound it: the controller may leave out
            // responses where data says it all.
            attributes: ConnectAttributes(ConnectAttributes::DISABLE_SQ_FLOW_CONTROL),
            kato_ms: if qid == 0 { options.keep_alive_ms } else { 0 },
        };
        let (cqe, _) = self.execute("Connect", qid != 0, connect.to_sqe(), None, &data).await?;
        Ok(Connected::from_result(cqe.result).cntlid)
    }

    async fn property(&mut self, at: u32, wide: bool) -> Result<u64, OpenError> {
        let sqe = PropertyGet { wide, offset: at }.to_sqe();
        Ok(self.execute("Property Get", false, sqe, None, &[]).await?.0.result)
    }

    /// Enables the controller and returns the most entries that a queue may have.
    async fn enable(&mut self) -> Result<u32, OpenError> {
        let capabilities = Capabilities::decode(self.property(offset::CAP, true).await?);
        let configuration = Configuration { enable: true, sqe_log2: 6, cqe_log2: 4, ..Configuration::RESET };
        let value = configuration.encode().into();
        let sqe = PropertySet { wide: false, offset: offset::CC, value }.to_sqe();
        self.execute("enabling the controller", false, sqe, None, &[]).await?;
        let timeout_ns = u64::from(capabilities.ready_timeout_500ms.max(1)) * 500_000_000;
        let deadline_ns = sys::clock::now_ns() + timeout_ns;
        loop {
            let status = ControllerStatus::decode(self.property(offset::CSTS, false).await? as u32);
            let status = status.map_err(|error| OpenError::Answer("CSTS", error))?;
            if status.fatal {
                return Err(OpenError::Command("enabling the controller", Status::INTERNAL_ERROR));
            }
            if status.ready {
                return Ok(capabilities.queue_entries_max);
            }
            if sys::clock::now_ns() > deadline_ns {
                return Err(OpenError::Timeout("enabling the controller"));
            }
            // CSTS can only be asked for; the specification has no event for it.
            self.core.sleep_ns(1_000_000).await;
        }
    }

    async fn identify(&mut self, cns: u8, nsid: u32) -> Result<Buffer, OpenError> {
        let buffer = self.core.pool().take(identify::SIZE).ok_or(OpenError::NoMemory)?;
        let sqe = Identify { cns, cntid: 0, cns_specific: 0, csi: 0, uuid_index: 0 }.to_sqe(nsid);
        let (_, buffer) = self.execute("Identify", false, sqe, Some(buffer), &[]).await?;
        buffer.ok_or(OpenError::NoMemory)
    }

    async fn identify_controller(&mut self) -> Result<IdentifyController, OpenError> {
        let buffer = self.identify(identify::Cns::Controller.to_wire(), 0).await?;
        IdentifyController::decode(page(&buffer))
            .map_err(|error| OpenError::Answer("Identify Controller", error))
    }

    async fn request_queues(&mut self) -> Result<(), OpenError> {
        let set = SetFeatures {
            fid: feature::FeatureId::NumberOfQueues.to_wire(),
            save: false,
            cdw11: 0, // one submission and one completion queue, both 0's based
            uuid_index: 0,
        };
        self.execute("Set Features (Number of Queues)", false, set.to_sqe(0), None, &[]).await?;
        Ok(())
    }

    async fn identify_namespace(
        &mut self,
        nsid: u32,
        identity: &IdentifyController,
    ) -> Result<Facts, OpenError> {
        let buffer = self.identify(identify::Cns::Namespace.to_wire(), nsid).await?;
        let namespace = IdentifyNamespace::decode(page(&buffer))
            .map_err(|error| OpenError::Answer("Identify Namespace", error))?;
        Facts::new(nsid, &namespace, identity.mdts, identity.oncs)
    }

    /// Queues a Keep Alive.
    pub(crate) fn keep_alive(&mut self) {
        if self.admin.failure.is_none() && !self.admin.is_full() {
            let request = Request::new(Tag(u64::MAX), Op::Flush, 0, 0);
            self.admin.submit(Sqe::new(AdminOpcode::KeepAlive.to_wire()), request, Data::None, &[]);
            self.admin.flush(&mut self.network);
        }
    }
}

pub(super) fn page(buffer: &Buffer) -> &[u8; identify::SIZE] {
    buffer.as_slice().first_chunk().expect("Identify data was asked for with a whole page")
}

pub(super) fn connect(
    network: &mut Sockets,
    address: SocketAddr,
    entries: u32,
    uri: &TcpUri,
) -> Result<Queue, OpenError> {
    let stream = net::connect(address).map_err(|error| OpenError::Connect(address, error))?;
    let id = network.add(stream).map_err(|error| OpenError::Connect(address, error))?;
    // One entry of a queue always stays empty (Base 2.0, section 3.3.1.5), so that full is not empty.
    Ok(Queue::new(id, entries - 1, uri.header_digest, uri.data_digest))
}

/// The name of a host that has none: the UUID form of its identifier.
pub(super) fn host_nqn(id: &[u8; 16]) -> Nqn {
    let hex: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    let uuid = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-");
    Nqn::new(&format!("nqn.2014-08.org.nvmexpress:uuid:{uuid}")).expect("the UUID form is an NQN")
}

/// Ends when either does.
pub(super) async fn first(
    mut one: std::pin::Pin<&mut impl Future<Output = ()>>,
    mut other: std::pin::Pin<&mut impl Future<Output = ()>>,
) {
    std::future::poll_fn(|context| {
        let done = one.as_mut().poll(context).is_ready() || other.as_mut().poll(context).is_ready();
        if done { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}
