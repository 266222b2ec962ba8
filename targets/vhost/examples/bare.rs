//! The least block device that a vhost-user client accepts: the upper bound of any, with the same client.
//!
//! `bare SOCKET` listens, and serves one split virtqueue of one client until it disconnects. The device
//! spins. It completes every chain with success: it follows the descriptors to the last one, which has the
//! status, and looks neither at the request nor at its data. So it costs what the memory costs that both
//! sides write, and no more. It trusts its client.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};

use dma::SharedRegion;
use sockets::{ReceivedDescriptors, Wait, receive_with_descriptors, send_with_descriptors};
use wire_vhost_user::{
    CONFIG_BYTES_MAX, ConfigHeader, FrontendRequest, ProtocolFeatures, SingleRegion, U64Payload,
    VhostUserHeader, VringAddress, VringState,
};
use wire_virtio::blk::{BlkConfig, BlkStatus};
use wire_virtio::split::{Descriptor, available, used};
use wire_virtio::{Features, descriptor_flags, needs_event};

type BareError = Box<dyn std::error::Error>;

/// Sectors of the device: 1 GiB.
const SECTORS: u64 = 1 << 21;
/// Chains that are completed before the driver sees them: it works on some while the device works on others.
const BATCH_MAX: u16 = 8;
/// Polls of the virtqueue between two looks at the socket.
const POLLS: usize = 1024;
/// Descriptors with a message.
const DESCRIPTORS_MAX: usize = 8;

const FEATURES: Features = Features::VERSION_1
    .union(Features::EVENT_IDX)
    .union(Features::BLK_BLK_SIZE)
    .union(Features::VHOST_USER_PROTOCOL_FEATURES);
const PROTOCOL_FEATURES: ProtocolFeatures = ProtocolFeatures::MQ
    .union(ProtocolFeatures::REPLY_ACK)
    .union(ProtocolFeatures::CONFIG)
    .union(ProtocolFeatures::CONFIGURE_MEM_SLOTS);

/// Memory that the client shares.
struct Region {
    guest: u64,
    user: u64,
    bytes: u64,
    /// Offset of its first byte in the mapping.
    offset: u64,
    memory: SharedRegion,
}

/// The device of a client.
#[derive(Default)]
struct Device {
    regions: Vec<Region>,
    size: u16,
    address: Option<VringAddress>,
    call: Option<OwnedFd>,
    ring: Option<Ring>,
}

/// A virtqueue that runs: the region that its areas are in, and their offsets there.
struct Ring {
    region: usize,
    table: u64,
    available: u64,
    used: u64,
    next_available: u16,
    next_used: u16,
}

impl Device {
    /// The region of an address and the offset in its mapping.
    fn find(&self, address: u64, start: impl Fn(&Region) -> u64) -> Option<(usize, u64)> {
        self.regions.iter().enumerate().find_map(|(index, region)| {
            let offset = address.wrapping_sub(start(region));
            (offset < region.bytes).then(|| (index, region.offset + offset))
        })
    }

    fn start(&mut self) -> Result<(), BareError> {
        let address = self.address.as_ref().ok_or("a virtqueue without addresses is started")?;
        let place = |address| self.find(address, |region| region.user).ok_or("an area is not in memory");
        let (region, table) = place(address.descriptors)?;
        let (available, used) = (place(address.available)?.1, place(address.used)?.1);
        self.ring = Some(Ring { region, table, available, used, next_available: 0, next_used: 0 });
        Ok(())
    }

    /// Completes the chains that are available, up to [`BATCH_MAX`].
    fn poll(&mut self) -> Result<(), BareError> {
        let Some(mut ring) = self.ring.take() else { return Ok(()) };
        let memory = &self.regions[ring.region].memory;
        let old = ring.next_used;
        let pending = memory.load_u16(ring.available + available::INDEX).wrapping_sub(ring.next_available);
        for _ in 0..pending.min(BATCH_MAX) {
            let head = memory.load_u16(ring.available + available::entry(ring.next_available, self.size));
            ring.next_available = ring.next_available.wrapping_add(1);
            let mut last = head;
            let status = loop {
                let at = ring.table + Descriptor::SIZE as u64 * u64::from(last % self.size);
                let [address, rest] = [memory.load_u64(at), memory.load_u64(at + 8)];
                if (rest >> 32) as u16 & descriptor_flags::NEXT == 0 {
                    break address;
                }
                last = (rest >> 48) as u16;
            };
            let (region, offset) =
                self.find(status, |region| region.guest).ok_or("a status is not in memory")?;
            self.regions[region].memory.store_u8(offset, BlkStatus::Ok.to_wire());
            let at = ring.used + used::entry(ring.next_used, self.size);
            memory.store_u32(at, head.into());
            memory.store_u32(at + 4, 1);
            ring.next_used = ring.next_used.wrapping_add(1);
        }
        if ring.next_used != old {
            memory.store_u16(ring.used + used::INDEX, ring.next_used);
            std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
            let event = memory.load_u16(ring.available + available::used_event(self.size));
            if let Some(call) = self.call.as_ref().filter(|_| needs_event(event, ring.next_used, old)) {
                rustix::io::write(call, &1_u64.to_ne_bytes())?;
            }
        }
        self.ring = Some(ring);
        Ok(())
    }

    /// Executes a request. Returns the payload of its reply, if it has one.
    fn execute(
        &mut self,
        kind: FrontendRequest,
        payload: &[u8],
        descriptor: Option<OwnedFd>,
    ) -> Result<Option<Vec<u8>>, BareError> {
        use FrontendRequest as Kind;
        let number = |value: u64| Ok(Some(U64Payload { value }.to_bytes().to_vec()));
        match kind {
            Kind::GetFeatures => return number(FEATURES.bits()),
            Kind::GetProtocolFeatures => return number(PROTOCOL_FEATURES.bits()),
            Kind::GetQueueNum | Kind::GetMaxMemSlots => return number(DESCRIPTORS_MAX as u64),
            Kind::GetConfig => {
                let ConfigHeader { offset, size, .. } = ConfigHeader::decode(payload)?;
                let config = [0; BlkConfig::SIZE];
                let mut config = BlkConfig::decode(&config)?;
                (config.capacity, config.block_size, config.queues) = (SECTORS, 512, 1);
                let mut space = [0; CONFIG_BYTES_MAX];
                space[..BlkConfig::SIZE].copy_from_slice(&config.to_bytes());
                let range = offset as usize..(offset + size) as usize;
                let bytes = space.get(range).ok_or("there is no such configuration")?;
                return Ok(Some([&payload[..ConfigHeader::SIZE], bytes].concat()));
            }
            Kind::AddMemReg => {
                let region = SingleRegion::decode(payload)?.region();
                let file = descriptor.ok_or("a region without a file")?;
                let (memory, offset) =
                    SharedRegion::map_peer_memory(file.as_fd(), region.mmap_offset, region.size)?;
                let (guest, user, bytes) = (region.guest_address, region.user_address, region.size);
                self.regions.push(Region { guest, user, bytes, offset, memory });
            }
            Kind::SetVringNum => self.size = VringState::decode(payload)?.value as u16,
            Kind::SetVringAddr => self.address = Some(VringAddress::decode(payload)?),
            Kind::SetVringCall => self.call = descriptor,
            Kind::SetVringKick => self.start()?,
            Kind::GetVringBase => {
                self.ring = None;
                return Ok(Some(VringState { index: 0, value: 0 }.to_bytes().to_vec()));
            }
            _ => {}
        }
        Ok(None)
    }
}

/// Executes a message, if one has arrived. Returns whether the client is connected.
fn receive(stream: &UnixStream, device: &mut Device) -> Result<bool, BareError> {
    let mut descriptors = ReceivedDescriptors::new(DESCRIPTORS_MAX);
    let mut header = [0; VhostUserHeader::SIZE];
    let mut parts = [IoSliceMut::new(&mut header)];
    match receive_with_descriptors(stream, &mut parts, &mut descriptors, Wait::No) {
        Ok(VhostUserHeader::SIZE) => {}
        Ok(0) => return Ok(false),
        Ok(_) => return Err("a header in pieces".into()),
        Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(true),
        Err(error) => return Err(error.into()),
    }
    let header = VhostUserHeader::decode(&header)?;
    let mut payload = vec![0; header.payload_bytes as usize];
    io::Read::read_exact(&mut &*stream, &mut payload)?;
    let kind = FrontendRequest::from_wire(header.request).ok_or("an unknown request")?;
    let descriptor = VecDeque::from(descriptors.take()).pop_front();
    let reply = device.execute(kind, &payload, descriptor)?;
    let reply = reply.or_else(|| header.needs_reply.then(|| U64Payload { value: 0 }.to_bytes().to_vec()));
    if let Some(reply) = reply {
        let bytes = [&header.reply(reply.len() as u32).to_bytes()[..], &reply].concat();
        send_with_descriptors(stream, &[IoSlice::new(&bytes)], &[], Wait::Yes)?;
    }
    Ok(true)
}

fn main() -> Result<(), BareError> {
    let socket = std::env::args_os().nth(1).ok_or("usage: bare SOCKET")?;
    let (stream, _) = UnixListener::bind(socket)?.accept()?;
    let mut device = Device::default();
    while receive(&stream, &mut device)? {
        for _ in 0..POLLS {
            device.poll()?;
        }
    }
    Ok(())
}
