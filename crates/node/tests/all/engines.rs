//! Engines that wait for events: they serve sessions of every carrier, and take no CPU time while nothing happens.

use crate::support::keeper::{self, Keeper};
use farside_fabrics::executor::block_on;
use farside_fabrics::memory::{Mapping, Pages};
use farside_fabrics::ring::RingLine;
use farside_fabrics::session::carrier::Line;
use farside_fabrics::session::client::Config;
use farside_fabrics::session::endpoint::Endpoint;
use farside_fabrics::tcp::TcpLine;
use farside_fabrics::udp::UdpLine;
use farside_node::host::{EngineMode, Host, Listen, Options};
use farside_remote::control::{Answer, Ask};
use farside_remote::fabric::ServiceId;
use farside_remote::service::{Kind, address};
use farside_remote::{Fabric, Key, NodeId};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(20);
const NODE: NodeId = NodeId(0);
/// Name of the variable with the folder of the node's process.
const FOLDER: &str = "FARSIDE_TEST_EVENT_NODE";
/// Time for which the node is left alone.
const IDLE: Duration = Duration::from_secs(2);

/// The process of the node, so that its CPU time can be read. It is no test, but must be one to be run.
#[test]
#[ignore = "a process that another test starts"]
fn node_process() {
    #[allow(clippy::disallowed_methods, reason = "the test that starts this process names the folder by it")]
    let folder = std::env::var_os(FOLDER).map(PathBuf::from);
    let Some(folder) = folder else { return };
    let any = (std::net::Ipv4Addr::LOCALHOST, 0).into();
    let listen = vec![Listen::Ring(folder.join("ring")), Listen::Tcp(any), Listen::Udp(any)];
    let engine_mode = if folder.join("polls").exists() { EngineMode::Poll } else { EngineMode::Event };
    let options = Options { listen, engine_mode, ..Options::default() };
    let memory = Mapping::create(16 << 20, Pages::Small).expect("memory");
    let host =
        Host::start(memory, vec![Box::new(Keeper) as Box<dyn Kind<Mapping>>], options).expect("it serves");
    let (name, kind, parameters) = ("s".into(), "keeper".into(), String::new());
    let created = host.ask(Ask::CreateStore { name, kind, parameters, quota: 4 << 20 }, DEADLINE);
    assert!(matches!(created, Ok(Answer::Store(_))), "{created:?}");
    let at = |listen: &Listen| match listen {
        Listen::Tcp(at) | Listen::Udp(at) => at.to_string(),
        _ => String::new(),
    };
    let addresses: Vec<String> = host.listening().iter().map(at).collect();
    // The name appears with all contents.
    std::fs::write(folder.join("written"), addresses.join("\n")).expect("written");
    std::fs::rename(folder.join("written"), folder.join("ready")).expect("renamed");
    std::thread::park();
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        self.0.kill().expect("it runs");
        self.0.wait().expect("it was killed");
    }
}

struct Client<L: Line> {
    endpoint: Endpoint<L>,
    key: Key,
}

fn connect<L: Line + 'static>(line: L, identity: u128) -> Client<L> {
    let config = Config { identity, incarnation: 1, nonce: 7, ..Config::default() };
    let endpoint = Endpoint::open(line, NODE, config).unwrap_or_else(|error| panic!("{error}"));
    let mut answer = Vec::new();
    let ask = serde_json::to_vec(&Ask::OpenStore { name: "s".into() }).expect("plain data");
    block_on(&endpoint, endpoint.call(NODE, ServiceId::NODE, &ask, &mut answer)).expect("the store is there");
    let Ok(Answer::Store(store)) = serde_json::from_slice(&answer) else { panic!("no store") };
    Client { endpoint, key: store.extent().key }
}

impl<L: Line + 'static> Client<L> {
    /// Reserves. Returns the number of reservations of the session.
    fn reserve(&self) -> u64 {
        let (mut request, mut answer) = (Vec::new(), Vec::new());
        let service = address(self.key, &mut request);
        request.push(keeper::Ask::Reserve as u8);
        block_on(&self.endpoint, self.endpoint.call(NODE, service, &request, &mut answer)).expect("served");
        u64::from_le_bytes(answer[8..].try_into().expect("eight bytes"))
    }
}

/// CPU time that a process has used so far.
fn cpu_time(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("the process runs");
    let (_, fields) = stat.rsplit_once(')').expect("the name is in parentheses");
    let ticks =
        fields.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<u64>().expect("a number"));
    // Linux reports this time in hundredths of a second to all programs.
    Duration::from_millis(10) * ticks.sum::<u64>() as u32
}

/// A node in a process of its own, with a session at each of its engines.
struct Home {
    node: Killed,
    ring: Client<RingLine>,
    tcp: Client<TcpLine>,
    udp: Client<UdpLine>,
    _folder: tempfile::TempDir,
}

impl Home {
    fn new(mode: EngineMode) -> Home {
        let folder = tempfile::tempdir().expect("a folder");
        if mode == EngineMode::Poll {
            std::fs::write(folder.path().join("polls"), "").expect("written");
        }
        let program = std::env::current_exe().expect("this test");
        let mut command = Command::new(program);
        command
            .args(["--exact", "engines::node_process", "--ignored", "--nocapture"])
            .env(FOLDER, folder.path());
        let child = command.stdout(Stdio::null()).stderr(Stdio::inherit()).spawn().expect("it starts");
        let node = Killed(child);
        let began = Instant::now();
        let ready = folder.path().join("ready");
        while !ready.exists() {
            assert!(began.elapsed() < DEADLINE, "the node starts");
            std::thread::park_timeout(Duration::from_millis(2));
        }
        let addresses = std::fs::read_to_string(&ready).expect("its addresses");
        let addresses: Vec<_> = addresses.lines().map(str::parse).collect();
        let [_, Ok(tcp), Ok(udp)] = addresses[..] else { panic!("{addresses:?}") };
        let ring = connect(RingLine::connect(&folder.path().join("ring")).expect("a line"), 1);
        let tcp = connect(TcpLine::connect(tcp).expect("a line"), 2);
        let udp = connect(UdpLine::connect(udp, None).expect("a line"), 3);
        Home { node, ring, tcp, udp, _folder: folder }
    }

    fn cpu_time(&self) -> Duration {
        cpu_time(self.node.0.id())
    }
}

#[test]
fn engines_that_wait_for_events_serve_every_carrier_and_take_no_cpu_time_when_idle() {
    const CALLS: u64 = 300;
    let home = Home::new(EngineMode::Event);
    let Home { ring, tcp, udp, .. } = &home;
    for call in 1..=CALLS {
        assert_eq!([ring.reserve(), tcp.reserve(), udp.reserve()], [call; 3]);
    }
    let before = home.cpu_time();
    std::thread::park_timeout(IDLE);
    let used = home.cpu_time() - before;
    // Two ticks of the system's clock. The sessions are open, so engines wake for their timers.
    assert!(used <= IDLE / 100, "the idle node used {used:?} in {IDLE:?}");
    assert_eq!([ring.reserve(), tcp.reserve(), udp.reserve()], [CALLS + 1; 3], "the sessions are open");
}

/// Measures the CPU time of nodes that are idle, and that serve a thousand calls a second.
#[test]
#[ignore = "takes two minutes"]
fn soak_the_cpu_time_of_both_modes() {
    const LASTS: Duration = Duration::from_secs(10);
    const EVERY: Duration = Duration::from_millis(1);
    let share = |used: Duration| used.as_secs_f64() / LASTS.as_secs_f64() * 100.0;
    for carrier in ["ring", "tcp", "udp"] {
        let busy = [EngineMode::Poll, EngineMode::Event].map(|mode| {
            let home = Home::new(mode);
            let before = home.cpu_time();
            for _ in 0..5 {
                std::thread::sleep(LASTS / 5);
                // A session that is silent for longer ends.
                let _kept_open = [home.ring.reserve(), home.tcp.reserve(), home.udp.reserve()];
            }
            let idle = home.cpu_time() - before;
            let (before, began) = (home.cpu_time(), Instant::now());
            let mut calls = 0;
            while began.elapsed() < LASTS {
                match carrier {
                    "ring" => home.ring.reserve(),
                    "tcp" => home.tcp.reserve(),
                    _ => home.udp.reserve(),
                };
                calls += 1;
                std::thread::sleep((EVERY * calls).saturating_sub(began.elapsed()));
            }
            let busy = home.cpu_time() - before;
            println!(
                "{carrier} {mode:?}: idle {:.2} %, at {} calls/s {:.2} %",
                share(idle),
                f64::from(calls) / LASTS.as_secs_f64(),
                share(busy)
            );
            busy
        });
        println!("{carrier}: {:.2} of the polling engine", busy[1].as_secs_f64() / busy[0].as_secs_f64());
        assert!(busy[1] < busy[0], "engines that wait for events take less CPU time");
    }
}
