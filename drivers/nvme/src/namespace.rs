//! A namespace as a channel, whatever is in between.

use memory::Buffer;
use reactor::Core;
use ring::{Channel, Completion, Request};

use crate::error::{Failure, OpenError};
use crate::options::Options;
use crate::tcp::TcpNamespace;
use crate::uri::Uri;

/// A namespace, open on one core with a queue pair of its own.
pub struct Namespace(Way);

enum Way {
    Tcp(Box<TcpNamespace>),
}

impl Namespace {
    /// Opens the namespace on the core that will use it, and connects to its controller where that was not
    /// done yet.
    pub async fn open(core: &Core, uri: &Uri, options: &Options) -> Result<Namespace, OpenError> {
        match uri {
            Uri::Tcp(uri) => {
                let namespace = TcpNamespace::open(core, uri, options).await?;
                Ok(Namespace(Way::Tcp(Box::new(namespace))))
            }
            Uri::Pcie(_) | Uri::VfioUser(_) => {
                Err(OpenError::Unsupported("this build drives only controllers over TCP"))
            }
        }
    }

    /// Bytes of a logical block.
    pub fn block_size(&self) -> u32 {
        match &self.0 {
            Way::Tcp(namespace) => namespace.block_size(),
        }
    }

    /// Number of logical blocks.
    pub fn blocks(&self) -> u64 {
        match &self.0 {
            Way::Tcp(namespace) => namespace.blocks(),
        }
    }

    /// Most bytes of one request.
    pub fn transfer_max_bytes(&self) -> u32 {
        match &self.0 {
            Way::Tcp(namespace) => namespace.transfer_max_bytes(),
        }
    }

    /// Why the namespace can no longer be reached, if so.
    pub fn failure(&self) -> Option<Failure> {
        match &self.0 {
            Way::Tcp(namespace) => namespace.failure(),
        }
    }
}

impl Channel for Namespace {
    type Request = Request<Buffer>;
    type Completion = Completion<Buffer>;

    #[inline]
    fn submit(&mut self, batch: &mut Vec<Self::Request>) {
        match &mut self.0 {
            Way::Tcp(namespace) => namespace.submit(batch),
        }
    }

    #[inline]
    fn poll(&mut self, sink: &mut Vec<Self::Completion>) -> usize {
        match &mut self.0 {
            Way::Tcp(namespace) => namespace.poll(sink),
        }
    }

    fn deadline(&self) -> Option<u64> {
        match &self.0 {
            Way::Tcp(namespace) => namespace.deadline(),
        }
    }
}
