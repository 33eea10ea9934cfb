//! Impostors of a node over `shm`: their clients exit with an error within 5 s.

use crate::hostile::in_time;
use crate::hostile::peer::{ANSWERED, BYE, HEADER, NODE, Peer, REFUSED, answer, u64_at};
use crate::support::raw_ring::{self, sealed};
use crate::support::{Node, PATIENCE, Ran, farside, for_each_at_once, until};
use farside_remote::fabric::ServiceId;
use farside_remote::{Fabric, NodeId};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::Signal;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Wake, Waker};
use std::time::Instant;

/// A socket served by an impostor of a node, on a thread that lives as long as the test's process.
struct Impostor {
    folder: tempfile::TempDir,
}

impl Impostor {
    fn new(mut meet: impl FnMut(Peer) + Send + 'static) -> Impostor {
        let folder = tempfile::tempdir().expect("a folder");
        let listener = raw_ring::listen(&folder.path().join("node.sock"));
        std::thread::spawn(move || {
            while let Ok(socket) = rustix::net::accept_with(&listener, SocketFlags::CLOEXEC) {
                meet(Peer::over(socket));
            }
        });
        Impostor { folder }
    }

    fn url(&self) -> String {
        format!("shm:{}", self.folder.path().join("node.sock").display())
    }

    /// Runs a client against the impostor.
    #[track_caller]
    fn run(&self, arguments: &[&str]) -> Ran {
        farside([arguments, &["--pool", &self.url()]].concat())
    }
}

const WELCOME: &[u8] = br#"{"Welcome":{"slot":0,"number":1,"incarnation":7}}"#;

#[test]
fn an_invalid_greeting_is_an_error() {
    let deep = "[".repeat(50_000);
    let greetings: [(&[u8], &str); 11] = [
        (b"", "hung up"),
        (b"\0\xff", "not a node that this program knows"),
        (b"null", "not a node that this program knows"),
        (b"{}", "not a node that this program knows"),
        (br#"{"Welcome":{}}"#, "not a node that this program knows"),
        (br#"{"Welcome":{"slot":-1,"number":1,"incarnation":7}}"#, "not a node that this program knows"),
        (br#"{"Frob":"x"}"#, "not a node that this program knows"),
        (deep.as_bytes(), "not a node that this program knows"),
        (&[b' '; 100_000], "could not receive"),
        (br#"{"Refusal":"come back later"}"#, "the node refuses: come back later"),
        (WELCOME, "it sent no memory"),
    ];
    for_each_at_once(greetings, |_, (greeting, reason)| {
        let greeting = greeting.to_vec();
        let impostor = Impostor::new(move |peer| {
            peer.receive();
            peer.send(&greeting).expect("the client listens");
        });
        in_time(&impostor.run(&["kv", "get", "k"]).refused(reason));
    });
    let hangs_up = Impostor::new(drop);
    hangs_up.run(&["kv", "get", "k"]).refused("");
}

/// Creates an anonymous file of `len` bytes, like a node's memory, that begins with the words `header`.
fn memory(len: u64, header: &[u64]) -> OwnedFd {
    use rustix::fs::{MemfdFlags, SealFlags};
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("impostor", flags).expect("memory");
    rustix::fs::ftruncate(&fd, len).expect("memory");
    let bytes: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
    rustix::io::pwrite(&fd, &bytes, 0).expect("memory");
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::SEAL).expect("memory");
    fd
}

fn rings() -> OwnedFd {
    sealed(raw_ring::SIZE)
}

fn bell() -> OwnedFd {
    use rustix::event::EventfdFlags;
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a bell")
}

#[test]
fn an_invalid_memory_is_an_error() {
    const MAGIC: u64 = u64::from_le_bytes(*b"farside\0");
    const LAYOUT: u64 = 2;
    const SIZE: u64 = 8 << 20;
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let folder = tempfile::tempdir().expect("a folder");
    let file = |len: u64| {
        let mut options = File::options();
        let file = options.read(true).write(true).create_new(true).open(folder.path().join(len.to_string()));
        let file = file.expect("a file");
        file.set_len(len).expect("a file");
        OwnedFd::from(file)
    };
    let read_only = memory(SIZE, &[MAGIC, LAYOUT, SIZE, 7]);
    let read_only = File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&read_only)));
    let memories: Vec<(OwnedFd, &str)> = vec![
        (reader.into(), "a memory of 0 bytes"),
        (writer.into(), "a memory of 0 bytes"),
        (File::open("/dev/zero").expect("a device").into(), "a memory of 0 bytes"),
        (raw_ring::socket(), "a memory of 0 bytes"),
        (bell(), "a memory of 0 bytes"),
        (File::open(folder.path()).expect("a folder").into(), "a memory of"),
        (file(0), "a memory of 0 bytes"),
        (file(4096), "a memory of 4096 bytes"),
        (file(SIZE + 1), "a memory of 8388609 bytes"),
        (file(SIZE), "not a farside memory"),
        (memory(2 << 40, &[]), "a memory of 2199023255552 bytes"),
        (memory(SIZE, &[]), "not a farside memory"),
        (memory(SIZE, &[MAGIC, 1, SIZE, 7]), "use the same release"),
        (memory(SIZE, &[MAGIC, LAYOUT, 2 * SIZE, 7]), "truncated or extended"),
        (memory(SIZE, &[MAGIC, LAYOUT, SIZE, 8]), "another memory than it named"),
        (read_only.expect("our own file").into(), "could not map"),
    ];
    for_each_at_once(memories, |_, (memory, reason)| {
        let impostor = Impostor::new(move |peer| {
            peer.receive();
            peer.send_with(WELCOME, &[memory.as_fd(), rings().as_fd()]).expect("the client listens");
        });
        in_time(&impostor.run(&["kv", "get", "k"]).refused(reason));
    });
    // Too few descriptors, too many, invalid rings, and an impossible session slot.
    let good = || memory(SIZE, &[MAGIC, LAYOUT, SIZE, 7]);
    let (_reader, pipe) = std::io::pipe().expect("a pipe");
    let no_session = br#"{"Welcome":{"slot":4000000000,"number":1,"incarnation":7}}"#;
    let unfit: [(&[u8], Vec<OwnedFd>, &str); 7] = [
        (WELCOME, vec![good()], "it sent no memory"),
        (WELCOME, vec![good(), pipe.into()], "could be truncated"),
        (WELCOME, vec![good(), good()], "could be truncated"),
        (WELCOME, vec![good(), sealed(0)], "the rings have 0 bytes"),
        (WELCOME, vec![good(), sealed(raw_ring::SIZE + 4096)], "bytes, not"),
        (WELCOME, vec![good(), rings(), rings(), rings()], ""),
        (no_session, vec![good(), rings()], "offers a session"),
    ];
    for_each_at_once(unfit, |_, (welcome, fds, reason)| {
        let impostor = Impostor::new(move |peer| {
            peer.receive();
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(OwnedFd::as_fd).collect();
            peer.send_with(welcome, &fds).expect("the client listens");
        });
        in_time(&impostor.run(&["kv", "get", "k"]).refused(reason));
    });
}

#[test]
fn a_silent_node_times_out_and_is_named() {
    let silent = |until_greeted: bool| {
        let mut all = Vec::new();
        Impostor::new(move |peer| {
            if until_greeted {
                peer.receive();
            }
            all.push(peer);
        })
    };
    for until_greeted in [false, true] {
        let ran = silent(until_greeted).run(&["kv", "get", "k"]).refused("did not answer within");
        assert!(ran.err.contains(&std::process::id().to_string()), "{}", ran.err);
        in_time(&ran);
    }
}

/// What an impostor with a real node's memory does with a request.
enum Lie {
    Answer(Vec<u8>),
    Silence,
    HangUp,
}

/// Starts an impostor between clients and a node. It forwards the node's greeting, then lies: `lie` gets each request
/// and the node's response.
fn liar(node: &Path, mut lie: impl FnMut(&[u8], Vec<u8>) -> Lie + Send + 'static) -> Impostor {
    let real = node.to_owned();
    let mut silent = Vec::new();
    Impostor::new(move |mut client| {
        let mut server = Peer::connect(&real);
        server.send(&client.receive().expect("a hello").0).expect("the node listens");
        let (welcome, memory) = server.is_welcomed();
        client.welcomes(&welcome, &memory);
        while let Some(question) = client.hear() {
            assert!(server.say(&question), "the node listens");
            let answer = server.hear().expect("an answer");
            match lie(&question, answer) {
                Lie::Answer(answer) => _ = client.say(&answer), // The client may have exited.
                Lie::Silence => return silent.push((client, server)),
                Lie::HangUp => return server.bye(),
            }
        }
        server.bye();
    })
}

#[test]
fn invalid_responses_are_errors() {
    let node = Node::start();
    let body = |status: u32, body: &[u8]| {
        let body = body.to_vec();
        move |question: &[u8]| Lie::Answer(answer(u64_at(question, 0), NODE, status, &body))
    };
    type Answers = Box<dyn FnMut(&[u8]) -> Lie + Send>;
    let lies: Vec<(Answers, &str)> = vec![
        (Box::new(|_| Lie::Silence), "did not answer within"),
        (Box::new(|_| Lie::HangUp), "has ended"),
        (Box::new(|_| Lie::Answer(Vec::new())), "did not answer within"),
        (Box::new(|_| Lie::Answer(vec![0; 200_000])), "has ended"),
        (Box::new(|_| Lie::Answer(vec![0xff; 15])), "did not answer within"),
        (Box::new(|_| Lie::Answer(answer(u64::MAX, NODE, ANSWERED, b"\"done\""))), "did not answer within"),
        (Box::new(body(ANSWERED, b"")), "not understood"),
        (Box::new(body(ANSWERED, b"\xff\xfe")), "not understood"),
        (Box::new(body(ANSWERED, b"null")), "not understood"),
        (Box::new(body(ANSWERED, "[".repeat(50_000).as_bytes())), "not understood"),
        (Box::new(body(ANSWERED, b"\"done\"")), "an unexpected answer"),
        (Box::new(body(ANSWERED, br#"{"stores":[]}"#)), "an unexpected answer"),
        (Box::new(body(REFUSED, b"not today")), "not today"),
        (Box::new(body(REFUSED, b"\xff\xfe")), "\u{fffd}"),
        (Box::new(body(77, b"what is 77")), "what is 77"),
    ];
    let socket = node.socket();
    for_each_at_once(lies, |_, (mut answers, reason)| {
        let impostor = liar(socket, move |question, _| answers(question));
        in_time(&impostor.run(&["kv", "get", "k"]).refused(reason));
    });
}

#[test]
fn invalid_store_descriptions_never_harm_the_store() {
    let node = Node::start();
    node.run(["kv", "put", "k", "v"]).done();
    // The node's description of the store, with one field changed.
    let changes: [(&str, serde_json::Value); 25] = [
        ("slots", 0.into()),
        ("slots", 1.into()),
        ("slots", 3.into()),
        ("slots", (1u64 << 40).into()),
        ("slots", (1u64 << 63).into()),
        ("slots", u64::MAX.into()),
        ("seed", 0.into()),
        ("epoch", u64::MAX.into()),
        ("parameters", "".into()),
        ("parameters", "null".into()),
        ("parameters", "[".repeat(20_000).into()),
        ("kind", "pilaf".into()),
        ("region", 0.into()),
        ("region", 2.into()),
        ("region", 255.into()),
        ("region", 256.into()),
        ("region", u32::MAX.into()),
        ("secret", 0.into()),
        ("secret", 5.into()),
        ("table_at", 0.into()),
        ("table_at", 1.into()),
        ("table_at", (1u64 << 47).into()),
        ("table_len", 0.into()),
        ("table_len", u64::MAX.into()),
        ("incarnation", 1.into()),
    ];
    for (field, value) in changes {
        let (name, reported) = (field, value.clone());
        let impostor = liar(node.socket(), move |_, real| {
            let Ok(mut answer) = serde_json::from_slice::<serde_json::Value>(&real[HEADER..]) else {
                return Lie::Answer(real);
            };
            if let Some(store) = answer.get_mut("store") {
                let parameters = store["parameters"].as_str().expect("text");
                let mut parameters: serde_json::Value = serde_json::from_str(parameters).expect("JSON");
                if store.get(name).is_some() {
                    store[name] = value.clone();
                } else {
                    assert!(parameters.get(name).is_some(), "a store has no {name}");
                    parameters[name] = value.clone();
                    store["parameters"] = parameters.to_string().into();
                }
            }
            Lie::Answer([&real[..HEADER], answer.to_string().as_bytes()].concat())
        });
        for action in [&["put", "j", "w"][..], &["get", "k"], &["del", "j"], &["dump"]] {
            let ran = impostor.run(&[&["kv"], action].concat());
            assert!(matches!(ran.code, Some(0..=2)), "{field} {reported}: {action:?}: {}", ran.err);
            in_time(&ran);
        }
    }
    assert_eq!(node.run(["kv", "get", "k"]).done().out, b"v", "the store is unchanged");
}

#[test]
fn a_send_does_not_wait_for_a_peer_that_does_not_read() {
    let (ours, _theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .expect("two sockets");
    let send = || farside_fabrics::shm::frame::send(ours.as_fd(), &[0; HEADER], &[0; 1000], &[]);
    let refused = (0..100_000).find_map(|_| send().err());
    assert_eq!(refused, Some(Errno::AGAIN));
}

/// A waker whose `wake` waits until the test has made another call over the same session.
struct Slow {
    begun: mpsc::Sender<()>,
    asked: Mutex<mpsc::Receiver<()>>,
}

impl Wake for Slow {
    fn wake(self: Arc<Self>) {
        let _nobody_waits_any_more = self.begun.send(());
        let asked = self.asked.lock().expect("nobody panics");
        let _or_too_late = asked.recv_timeout(PATIENCE);
    }
}

#[test]
fn no_lock_is_held_while_a_waker_runs() {
    let node = Node::start();
    let endpoint = farside_fabrics::shm::connect(node.socket(), NodeId(0)).expect("the node serves");
    let (begun, has_begun) = mpsc::channel();
    let (asked, was_asked) = mpsc::channel();
    let slow = Arc::new(Slow { begun, asked: Mutex::new(was_asked) });
    let waker = Waker::from(slow);
    let mut answers = [Vec::new(), Vec::new()];
    let [first, second] = &mut answers;
    let mut call = Box::pin(endpoint.call(NodeId(0), ServiceId::NODE, b"\"node_info\"", first));
    node.process.signal(Signal::STOP);
    until("the node is stopped", || farside_fabrics::shm::is_stopped(node.process.pid()));
    assert!(call.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    node.process.signal(Signal::CONT);
    has_begun.recv_timeout(PATIENCE).expect("the answer comes");
    let since = Instant::now();
    let mut other = Box::pin(endpoint.call(NodeId(0), ServiceId::NODE, b"\"node_info\"", second));
    let _pending = other.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    drop(other);
    let took = since.elapsed();
    let _it_went_on = asked.send(());
    assert!(took < PATIENCE / 2, "the session holds a lock while it wakes: {took:?}");
}

#[test]
fn a_client_says_bye_after_an_invalid_welcome() {
    const MAGIC: u64 = u64::from_le_bytes(*b"farside\0");
    const LAYOUT: u64 = 2;
    const SIZE: u64 = 8 << 20;
    let good = || memory(SIZE, &[MAGIC, LAYOUT, SIZE, 7]);
    let welcomes: Vec<(&[u8], Vec<OwnedFd>)> = vec![
        (WELCOME, Vec::new()),
        (br#"{"Welcome":{"slot":4000000000,"number":1,"incarnation":7}}"#, vec![good(), rings()]),
        (WELCOME, vec![good(), bell()]),
        (WELCOME, vec![memory(4096, &[]), rings()]),
        (WELCOME, vec![memory(SIZE, &[MAGIC, LAYOUT, SIZE, 8]), rings()]),
    ];
    for (welcome, fds) in welcomes {
        let (sender, heard) = mpsc::channel();
        let impostor = Impostor::new(move |peer| {
            peer.receive();
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(OwnedFd::as_fd).collect();
            peer.send_with(welcome, &fds).expect("the client listens");
            let _the_test_failed = sender.send(peer.receive());
        });
        impostor.run(&["kv", "get", "k"]).refused("");
        let last = heard.recv_timeout(PATIENCE).expect("the client exits").expect("a last message");
        assert_eq!(last.0, [BYE]);
    }
}
