//! An engine whose port breaks.

use super::*;
use crate::host::{Host, Listen, LogFolder, Options};
use crate::log::LogOptions;
use farside_fabrics::executor::block_on;
use farside_fabrics::memory::Pages;
use farside_fabrics::session::carrier::{Arrival, Broken, Dropped};
use farside_fabrics::session::client;
use farside_fabrics::session::endpoint::Endpoint;
use farside_fabrics::udp::{UdpLine, UdpPort};
use farside_remote::service::address;
use farside_remote::{Fabric, NodeId};
use std::net::Ipv4Addr;
use std::os::fd::BorrowedFd;
use std::time::Instant;

#[allow(dead_code, reason = "other tests use more of it")]
#[path = "../../../tests/support/ledger.rs"]
pub(crate) mod ledger;

/// A port that breaks after it has received a request, once it may.
struct Breaking {
    port: UdpPort,
    may_break: Arc<AtomicBool>,
    is_broken: bool,
}

impl Port for Breaking {
    type Address = <UdpPort as Port>::Address;
    const IS_RELIABLE: bool = UdpPort::IS_RELIABLE;

    fn datagram_max(&self) -> usize {
        self.port.datagram_max()
    }
    fn receive(&mut self, take: impl FnMut(Self::Address, Arrival<'_>)) -> Result<bool, Broken> {
        if self.is_broken {
            return Err(Broken("an error of the system".into()));
        }
        let received = self.port.receive(take)?;
        self.is_broken = received && self.may_break.load(Ordering::SeqCst);
        Ok(received)
    }
    fn send(&mut self, to: Self::Address, datagram: &[u8]) {
        self.port.send(to, datagram);
    }
    fn flush(&mut self) {
        self.port.flush();
    }
    fn connections(&self) -> usize {
        self.port.connections()
    }
    fn hang_up(&mut self, address: Self::Address) {
        self.port.hang_up(address);
    }
    fn close_without_session(&mut self, known: impl Iterator<Item = Self::Address>) {
        self.port.close_without_session(known);
    }
    fn dropped(&self) -> Dropped {
        self.port.dropped()
    }
    fn fd(&self) -> BorrowedFd<'_> {
        self.port.fd()
    }
}

const DEADLINE: Duration = Duration::from_secs(20);

#[test]
fn an_engine_whose_port_breaks_ends_the_calls_that_wait_for_their_records() {
    let folder = tempfile::tempdir().expect("a folder");
    let log = LogFolder { path: folder.path().to_owned(), options: LogOptions::default() };
    let start = || {
        let memory = Mapping::create(16 << 20, Pages::Small).expect("memory");
        let listen = vec![Listen::Udp((Ipv4Addr::LOCALHOST, 0).into())];
        let options = Options { log: Some(log.clone()), listen, ..Options::default() };
        let kind = Box::new(ledger::Ledger::default());
        Host::start(memory, vec![kind], options).expect("it serves")
    };
    let host = start();
    let (name, kind, parameters) = ("s".into(), "ledger".into(), String::new());
    host.ask(Ask::CreateStore { name, kind, parameters, quota: 4 << 20 }, DEADLINE).expect("created");
    drop(host);
    let host = start();
    let Ok(Answer::Store(store)) = host.ask(Ask::OpenStore { name: "s".into() }, DEADLINE) else {
        panic!("the store is there")
    };
    // The writer opens the log for its first write, and waits for a reader.
    let file = folder.path().join(crate::log::folder_of(&store)).join("log.00000001");
    std::fs::remove_file(&file).expect("the log's file");
    let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU);
    rustix::fs::mknodat(rustix::fs::CWD, &file, kind, mode, 0).expect("a pipe");

    let shared = &host.shared;
    host.engines.lock().expect("no thread panicked").clear();
    shared.mails[0].stop.store(false, Ordering::SeqCst);
    let pid = std::process::id();
    let session = shared.open_engine(pid, crate::host::process::start_time(pid)).expect("a slot is free");
    let port = UdpPort::bind((Ipv4Addr::LOCALHOST, 0).into(), 1).expect("a port").remove(0);
    let at = port.address().expect("it is bound");
    let may_break = Arc::new(AtomicBool::new(false));
    let port = Breaking { port, may_break: Arc::clone(&may_break), is_broken: false };
    let _engine = Engine::start(shared, 0, session, port, None).expect("a thread");

    let node = NodeId(0);
    let config = client::Config { identity: 5, incarnation: 1, nonce: 7, ..client::Config::default() };
    let client = Endpoint::open(UdpLine::connect(at, None).expect("a line"), node, config);
    let client = client.unwrap_or_else(|error| panic!("{error}"));
    let (mut request, mut answer) = (Vec::new(), Vec::new());
    let ask = serde_json::to_vec(&Ask::OpenStore { name: "s".into() }).expect("plain data");
    block_on(&client, client.call(node, ServiceId::NODE, &ask, &mut answer)).expect("the store is there");
    let Ok(Answer::Store(opened)) = serde_json::from_slice(&answer) else { panic!("no store") };
    may_break.store(true, Ordering::SeqCst);
    let service = address(opened.extent().key, &mut request);
    ledger::Ask::Put(1, 7).encode(&mut request);
    block_on(&client, client.call(node, service, &request, &mut answer)).expect_err("the engine stopped");

    let served = shared.served(store.extent().key).expect("the store is there");
    let is_unfinished = || (0..100).any(|session| served.has_unfinished(session));
    let was_unfinished = is_unfinished();
    // A pipe has no positions, so the write fails.
    let reader = std::fs::File::open(&file).expect("the writer opens it");
    let began = Instant::now();
    while is_unfinished() {
        assert!(began.elapsed() < DEADLINE, "the call ends");
        std::thread::park_timeout(Duration::from_millis(1));
    }
    assert!(was_unfinished, "the call waited for its record when the engine stopped");
    drop(reader);
}
