//! A transport for tests: its clients connect to a UNIX socket and are sent the NQN of the subsystem there.
//!
//! It is what a new transport has to bring, and nothing else of the crate names it but its `mod` and its line
//! in the list of transports.

use std::convert::Infallible;
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;

use control::json::{Map, Value};
use control::{DecodeLog, ParameterError, Parameters};
use sockets::{ByteStream, ServerNetwork, StreamAddress};
use target_shell::{
    Accepted, CloseReason, ConnectionTotals, GroupLimits, IoContext, MoreToRead, Protocol,
    ProtocolConnection, ShellError, TargetCores,
};
use wire_nvme::log::TransportAddress;

use crate::snapshot::ConfigSnapshot;
use crate::transport::{
    AddressText, CoreQueues, Counters, Listening, Transport, TransportConfig, TransportKind,
    TransportParameters, TransportParts,
};
use crate::{ListenAddress, NvmfTargetError, TargetStats};

pub(crate) struct TestTransport;

control::parameters! {
    struct TestParameters {
        /// What is sent before an NQN
        greeting: Option<String>,
    }
}

#[derive(Clone, Debug)]
struct TestConfig {
    greeting: String,
}

struct TestCores {
    config: TestConfig,
    cores: TargetCores<TestProtocol>,
}

struct TestProtocol {
    greeting: String,
    accepted: u64,
}

struct TestConnection {
    unsent: Vec<u8>,
    draining: bool,
}

impl TransportKind for TestTransport {
    fn name(&self) -> &'static str {
        "TEST"
    }

    fn address_text(&self) -> AddressText {
        AddressText { traddr: "path of a socket", trsvcid: None }
    }

    fn listening(&self) -> Listening {
        Listening::Exclusive
    }

    fn normalize(&self, address: &ListenAddress) -> Result<ListenAddress, NvmfTargetError> {
        let trsvcid = String::new();
        Ok(ListenAddress { trtype: "TEST".into(), adrfam: String::new(), trsvcid, ..address.clone() })
    }

    fn discovery_address(&self, _address: &ListenAddress) -> Option<TransportAddress> {
        None
    }

    fn parameters(&self) -> TransportParameters {
        TransportParameters { shared: Vec::new(), own: TestParameters::declaration() }
    }

    fn decode(
        &self,
        object: &mut Map<String, Value>,
        log: &mut DecodeLog,
    ) -> Result<Box<dyn TransportConfig>, ParameterError> {
        let greeting = TestParameters::take_from(object, log)?.greeting.unwrap_or_default();
        Ok(Box::new(TestConfig { greeting }))
    }
}

impl<N: ServerNetwork> TransportConfig<N> for TestConfig {
    fn kind(&self) -> &'static dyn TransportKind {
        &TestTransport
    }

    fn check(&self) -> Result<(), NvmfTargetError> {
        Ok(())
    }

    fn to_object(&self) -> Map<String, Value> {
        TestParameters { greeting: Some(self.greeting.clone()) }.to_object()
    }

    fn start(&self, parts: &TransportParts<'_>) -> Result<Box<dyn Transport>, NvmfTargetError> {
        let greeting = self.greeting.clone();
        let protocol = move |_: &_, _: &_| TestProtocol { greeting: greeting.clone(), accepted: 0 };
        let cores = TargetCores::start(parts.reactors, parts.publisher, GroupLimits::default(), protocol)?;
        Ok(Box::new(TestCores { config: self.clone(), cores }))
    }
}

impl Transport for TestCores {
    fn options(&self) -> Map<String, Value> {
        TransportConfig::<sockets::Sockets>::to_object(&self.config)
    }

    fn listen(
        &self,
        address: &ListenAddress,
        portid: u16,
        _secure: bool,
    ) -> Result<ListenAddress, NvmfTargetError> {
        self.cores.listen(&StreamAddress::Unix(address.traddr.clone().into()), portid)?;
        Ok(address.clone())
    }

    fn stop_listening(&self, portid: u16) -> Result<(), ShellError> {
        self.cores.unlisten(Some(portid))
    }

    fn shutdown(&self) -> Result<(), ShellError> {
        self.cores.drain()
    }

    fn connections(&self) -> (&'static str, ConnectionTotals) {
        (TestProtocol::NAME, self.cores.totals())
    }

    fn queues(&self) -> Result<Vec<CoreQueues>, ShellError> {
        self.cores.query(|_, _| CoreQueues::default())
    }

    fn counters(
        &self,
        _reactors: &[reactor::ReactorHandle],
        _stats: &mut TargetStats,
    ) -> Result<Vec<Counters>, ShellError> {
        self.cores.query(|protocol, _| vec![("accepted", protocol.accepted)])
    }
}

impl Protocol for TestProtocol {
    const NAME: &'static str = "nvmf_test";
    type Config = ConfigSnapshot;
    type Connection = TestConnection;
    type Error = Infallible;

    fn accept(
        &mut self,
        accepted: Accepted,
        config: &Arc<ConfigSnapshot>,
        _now_ns: u64,
    ) -> Option<TestConnection> {
        let nqn = &config.subsystem_on(accepted.portid)?.nqn;
        self.accepted += 1;
        let unsent = format!("{}{nqn}\n", self.greeting).into_bytes();
        Some(TestConnection { unsent, draining: false })
    }
}

impl ProtocolConnection<TestProtocol> for TestConnection {
    fn receive<S: ByteStream>(
        &mut self,
        stream: &mut S,
        scratch: &mut [u8],
        _context: &mut IoContext<'_, TestProtocol>,
    ) -> Result<MoreToRead, CloseReason<Infallible>> {
        CloseReason::check(stream.receive(&mut [IoSliceMut::new(scratch)]))?;
        Ok(MoreToRead::No)
    }

    fn flush<S: ByteStream>(&mut self, stream: &mut S) -> Result<(), CloseReason<Infallible>> {
        let sent = CloseReason::check(stream.send(&[IoSlice::new(&self.unsent)]))?;
        self.unsent.drain(..sent);
        Ok(())
    }

    fn begin_drain(&mut self) {
        self.draining = true;
    }

    fn is_draining(&self) -> bool {
        self.draining
    }
}

mod tests {
    use std::fs;
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixStream;
    use std::path::Path;

    use bdev::Registry;
    use bdev::rpc::BdevModule;
    use control::json::json;
    use control::{ControlPlane, Parameters as _};

    use crate::module::NvmfModule;

    const NQN: &str = "nqn.2016-06.io.spdk:cnode1";

    #[test]
    fn a_transport_is_its_folder_and_one_line() {
        let reactors = reactor::Reactors::start(&reactor::ReactorConfig::default()).unwrap();
        let builder = ControlPlane::builder(Vec::new());
        let bdevs = BdevModule::new(Registry::new(), builder.examiner());
        let module = NvmfModule::new(bdevs.registry().clone(), reactors.handles(), Default::default());
        let app = builder.module(&module).module(&bdevs).start(None).unwrap();
        let ok = |method: &str, params: control::json::Value| {
            app.invoke(method, params).unwrap_or_else(|error| panic!("{method}: {error}"))
        };
        let directory = std::env::temp_dir().join(format!("nvmf-test-transport-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join("socket");

        ok("nvmf_create_transport", json!({ "trtype": "test", "greeting": "at " }));
        let described = ok("nvmf_get_transports", json!({ "trtype": "TEST" }));
        assert_eq!((&described[0]["trtype"], &described[0]["greeting"]), (&json!("TEST"), &json!("at ")));
        ok("nvmf_create_subsystem", json!({ "nqn": NQN }));
        let address = json!({ "trtype": "Test", "traddr": path });
        ok("nvmf_subsystem_add_listener", json!({ "nqn": NQN, "listen_address": address }));
        let mut line = String::new();
        BufReader::new(UnixStream::connect(&path).unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, format!("at {NQN}\n"));
        let stats = ok("nvmf_get_stats", json!({}));
        assert_eq!(stats["poll_groups"][0]["transports"], json!([{ "trtype": "TEST", "accepted": 1 }]));
        let saved = app.save().to_string();
        assert!(saved.contains("\"greeting\":\"at \"") && saved.contains("\"trtype\":\"TEST\""), "{saved}");
        let wrong = app.invoke("nvmf_create_transport", json!({ "trtype": "TCP", "greeting": 1 }));
        assert!(wrong.unwrap_err().message.contains("greeting: "));
        ok("nvmf_subsystem_remove_listener", json!({ "nqn": NQN, "listen_address": address }));
        assert!(!path.exists());
        fs::remove_dir_all(&directory).unwrap();

        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let naming = lines_naming(&sources, "TestTransport");
        assert_eq!(naming.len(), 1, "{naming:?}");
        assert_eq!(super::TestParameters::declaration().len(), 1);
    }

    /// Lines of other files than this one.
    fn lines_naming(directory: &Path, name: &str) -> Vec<String> {
        let mut found = Vec::new();
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                found.extend(lines_naming(&path, name));
            } else if !path.ends_with("test_transport.rs") {
                let text = fs::read_to_string(&path).unwrap();
                found.extend(text.lines().filter(|line| line.contains(name)).map(str::to_string));
            }
        }
        found
    }
}
