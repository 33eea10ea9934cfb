//! An endpoint whose node is silent for longer than the callers' time limit. Each caller must get the outcome of its
//! own request and of no other, even if its slot has been given to another request since.

use farside_fabrics::executor::Core;
use farside_fabrics::session::answer;
use farside_fabrics::session::carrier::{Broken, Datagrams, Line};
use farside_fabrics::session::client;
use farside_fabrics::session::endpoint::Endpoint;
use farside_fabrics::session::server::{Config, End, Hello, Host, Outcome, Request, RequestRef, Server};
use farside_fabrics::timer;
use farside_remote::fabric::{Fabric, Ran, ServiceId};
use farside_remote::{FabricError, NodeId};
use rustix::event::{EventfdFlags, eventfd};
use std::cell::{Cell, RefCell};
use std::collections::{HashSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_millis(40);
const SILENCE: Duration = Duration::from_millis(100);
const TASKS: u8 = 16;
const CALLS: u8 = 8;
/// Size of a request in bytes. It is so large that not all tasks can send at once. Some requests then fail unsent, and
/// their slots become free.
const REQUEST: usize = 8000;
const CREDIT: usize = 5 * REQUEST;

/// A node's host that responds to every call with the call's first two bytes, and records them.
#[derive(Default)]
struct Echo {
    ran: HashSet<[u8; 2]>,
}

impl Host for Echo {
    type Session = ();

    fn secret(&mut self) -> u64 {
        7
    }

    fn open(&mut self, _hello: &Hello<'_>) -> Result<(), String> {
        Ok(())
    }

    fn run(&mut self, _: &mut (), _at: RequestRef, request: Request<'_>, reply: &mut Vec<u8>) -> Outcome {
        let Request::Call(_, &[task, call, ..]) = request else { panic!("only calls are made") };
        assert!(self.ran.insert([task, call]), "each call runs once");
        answer::put_body(reply, &[task, call]);
        Outcome::Done
    }

    fn close(&mut self, _: (), _end: End) {}
}

/// A line to a node in this thread. The node handles nothing until `silent_until`.
struct Way {
    node: RefCell<(Server<u8, Echo>, Echo)>,
    asked: RefCell<VecDeque<Vec<u8>>>,
    silent_until: Cell<Duration>,
    answers: RefCell<VecDeque<Vec<u8>>>,
    bell: OwnedFd,
}

impl Datagrams for &Way {
    fn send(&self, datagram: &[u8]) -> Result<(), Broken> {
        self.asked.borrow_mut().push_back(datagram.to_vec());
        Ok(())
    }

    fn flush(&self) -> Result<(), Broken> {
        Ok(())
    }

    fn receive(&self, mut take: impl FnMut(&[u8])) -> Result<bool, Broken> {
        if timer::now() >= self.silent_until.get() {
            let (server, echo) = &mut *self.node.borrow_mut();
            for datagram in self.asked.borrow_mut().drain(..) {
                server.receive(timer::now(), 0, &datagram, echo).expect("a valid client");
            }
            let mut out = Vec::new();
            while server.transmit(&mut out).is_some() {
                self.answers.borrow_mut().push_back(out.clone());
            }
        }
        let next = self.answers.borrow_mut().pop_front();
        next.iter().for_each(|datagram| take(datagram));
        Ok(next.is_some())
    }
}

impl Line for &Way {
    const IS_RELIABLE: bool = true;

    fn datagram_max(&self) -> usize {
        24 * 1024
    }

    fn inbound_bytes(&self) -> usize {
        1 << 20
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    fn sleep_max(&self) -> Option<Duration> {
        Some(Duration::from_millis(1))
    }
}

#[test]
fn a_timed_out_caller_gets_only_its_own_outcome() {
    let config = Config {
        node: 1,
        datagram: 24 * 1024,
        is_reliable: true,
        sessions_max: 1,
        inbound_bytes: CREDIT,
        ..Config::default()
    };
    let way = Way {
        node: RefCell::new((Server::new(config), Echo::default())),
        asked: RefCell::default(),
        silent_until: Cell::new(Duration::ZERO),
        answers: RefCell::default(),
        bell: eventfd(0, EventfdFlags::CLOEXEC).expect("a descriptor"),
    };
    let who = client::Config { identity: 1, incarnation: 1, nonce: 3, ..client::Config::default() };
    let endpoint = Endpoint::open(&way, NodeId(0), who).expect("a session");
    endpoint.set_call_timeout(PATIENCE);
    way.silent_until.set(timer::now() + SILENCE);
    let (answered, not_asked) = (Cell::new(0), RefCell::new(HashSet::new()));
    let mut core = Core::new(&endpoint);
    for task in 0..TASKS {
        let (endpoint, answered, not_asked) = (&endpoint, &answered, &not_asked);
        core.spawn(async move {
            for call in 0..CALLS {
                let mut request = vec![0; REQUEST];
                request[..2].copy_from_slice(&[task, call]);
                let mut reported = Vec::new();
                match endpoint.call(NodeId(0), ServiceId::NODE, &request, &mut reported).await {
                    Ok(()) => {
                        assert_eq!(reported, [task, call], "the response of another call");
                        answered.set(answered.get() + 1);
                    }
                    Err(error) if error.ran() == Ran::No => drop(not_asked.borrow_mut().insert([task, call])),
                    Err(FabricError::Deadline { .. }) => {}
                    Err(error) => panic!("the session continues: {error}"),
                }
            }
        });
    }
    core.run();
    drop(core);
    drop(endpoint);
    let node = way.node.borrow();
    let ran = &node.1.ran;
    assert!(answered.get() > 0 && !not_asked.borrow().is_empty(), "both cases occurred");
    assert!(
        not_asked.borrow().is_disjoint(ran),
        "requests reported as not run have not run: {:?}",
        not_asked.borrow()
    );
}
