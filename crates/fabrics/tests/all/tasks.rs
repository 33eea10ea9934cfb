//! The tasks' side of a session, by a clock and a line of the test: what the driver of a foreign executor must do.

use farside_fabrics::session::carrier::{Arrivals, Broken, Datagrams};
use farside_fabrics::session::client::{self, Client};
use farside_fabrics::session::server::{Config, End, Hello, Host, Outcome, Request, RequestRef, Server};
use farside_fabrics::session::tasks::TaskSession;
use farside_remote::clock::Clock;
use farside_remote::fabric::{DEADLINE, Fabric, ServiceId};
use farside_remote::{Addr, FabricError, Key, NodeId};
use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

const NODE: NodeId = NodeId(0);
const MS: Duration = Duration::from_millis(1);

/// A clock that the test sets, and the number of its sleeps so far, which never end.
#[derive(Default)]
struct Set(Cell<Duration>, Cell<u64>);

impl Clock for Set {
    fn now(&self) -> Duration {
        self.0.get()
    }

    fn wall(&self) -> Duration {
        self.0.get()
    }

    fn sleep(&self, _: Duration) -> impl Future<Output = ()> {
        self.1.set(self.1.get() + 1);
        std::future::pending()
    }
}

/// A host that never responds to calls, and counts the buffers that clients retire.
#[derive(Default)]
struct Mute {
    calls: u64,
    retired: u64,
}

impl Host for Mute {
    type Session = ();

    fn secret(&mut self) -> u64 {
        7
    }

    fn open(&mut self, _hello: &Hello<'_>) -> Result<(), String> {
        Ok(())
    }

    fn run(&mut self, _: &mut (), _at: RequestRef, request: Request<'_>, _: &mut Vec<u8>) -> Outcome {
        match request {
            Request::Retire(buffers) => {
                self.retired += buffers.count() as u64;
                Outcome::Done
            }
            _ => {
                self.calls += 1;
                Outcome::Later
            }
        }
    }

    fn close(&mut self, _: (), _end: End) {}
}

/// A line to a node in this thread, and the bell of its arrivals.
struct Near<'a> {
    clock: &'a Set,
    node: RefCell<(Server<u8, Mute>, Mute)>,
}

impl Datagrams for &Near<'_> {
    fn send(&self, datagram: &[u8]) -> Result<(), Broken> {
        let (server, host) = &mut *self.node.borrow_mut();
        server.receive(self.clock.0.get(), 0, datagram, host).map_err(|error| Broken(error.to_string()))
    }

    fn flush(&self) -> Result<(), Broken> {
        Ok(())
    }

    fn receive(&self, mut take: impl FnMut(&[u8])) -> Result<bool, Broken> {
        let (server, _) = &mut *self.node.borrow_mut();
        let (mut out, mut has_received) = (Vec::new(), false);
        while server.transmit(&mut out).is_some() {
            take(&out);
            has_received = true;
        }
        Ok(has_received)
    }
}

impl Arrivals for Near<'_> {
    fn arm(&self, _: &Waker) {}
}

/// Counts how often it is woken.
#[derive(Default)]
struct Woken(AtomicU64);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn near(clock: &Set) -> Near<'_> {
    let config = Config { is_reliable: true, ..Config::default() };
    Near { clock, node: RefCell::new((Server::new(config), Mute::default())) }
}

fn session<'a>(clock: &'a Set, line: &'a Near<'a>) -> TaskSession<&'a Near<'a>, &'a Set> {
    let config = client::Config {
        identity: 1,
        incarnation: 1,
        nonce: 3,
        is_reliable: true,
        silence: DEADLINE * 100,
        ..client::Config::default()
    };
    TaskSession::new(line, clock, NODE, Client::new(clock.0.get(), config), None)
}

#[test]
fn a_request_gets_its_whole_time_also_if_the_driver_sleeps_with_another_one_in_flight() {
    let clock = Set::default();
    let line = near(&clock);
    let session = session(&clock, &line);
    let mut cx = Context::from_waker(Waker::noop());
    let mut driver = pin!(session.drive(&line, Duration::ZERO));
    let (mut one, mut other) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        assert!(driver.as_mut().poll(&mut cx).is_pending());
    }
    assert!(session.granted().is_some(), "the session is open");
    let mut first = pin!(session.call(NODE, ServiceId::NODE, &[1], &mut one));
    assert!(first.as_mut().poll(&mut cx).is_pending() && driver.as_mut().poll(&mut cx).is_pending());
    clock.0.set(DEADLINE - 100 * MS);
    let mut second = pin!(session.call(NODE, ServiceId::NODE, &[2], &mut other));
    assert!(second.as_mut().poll(&mut cx).is_pending() && driver.as_mut().poll(&mut cx).is_pending());
    assert_eq!(line.node.borrow().1.calls, 2);
    clock.0.set(DEADLINE + 100 * MS);
    assert!(driver.as_mut().poll(&mut cx).is_pending());
    let failed = |polled| matches!(polled, Poll::Ready(Err(FabricError::Deadline { .. })));
    assert!(failed(first.as_mut().poll(&mut cx)), "its time is over");
    assert!(second.as_mut().poll(&mut cx).is_pending(), "most of its time is left");
    clock.0.set(DEADLINE * 2 - 99 * MS);
    assert!(driver.as_mut().poll(&mut cx).is_pending());
    assert!(failed(second.as_mut().poll(&mut cx)), "its time is over");
}

#[test]
fn the_driver_is_woken_once_for_whatever_is_to_be_sent() {
    let clock = Set::default();
    let line = near(&clock);
    let session = session(&clock, &line);
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(Arc::clone(&woken));
    let (mut by_driver, mut cx) = (Context::from_waker(&waker), Context::from_waker(Waker::noop()));
    let mut driver = pin!(session.drive(&line, Duration::ZERO));
    for _ in 0..2 {
        assert!(driver.as_mut().poll(&mut by_driver).is_pending());
    }
    let news = || woken.0.swap(0, Ordering::Relaxed);
    assert_eq!(news(), 0);
    for buffer in 1..4 {
        session.retire(NODE, Key::new(1, 1), Addr::new(buffer * 64));
    }
    assert_eq!(news(), 1, "for all retires");
    assert!(driver.as_mut().poll(&mut by_driver).is_pending());
    assert_eq!(line.node.borrow().1.retired, 3);
    let mut response = Vec::new();
    {
        let mut call = pin!(session.call(NODE, ServiceId::NODE, &[1], &mut response));
        assert!(call.as_mut().poll(&mut cx).is_pending());
        assert_eq!(news(), 1, "for the call");
        assert!(driver.as_mut().poll(&mut by_driver).is_pending());
    }
    assert_eq!(news(), 1, "to cancel the call");
}

#[test]
fn the_driver_sleeps_anew_only_for_an_earlier_timer() {
    let clock = Set::default();
    let line = near(&clock);
    let session = session(&clock, &line);
    let mut cx = Context::from_waker(Waker::noop());
    let mut driver = pin!(session.drive(&line, Duration::ZERO));
    for _ in 0..2 {
        assert!(driver.as_mut().poll(&mut cx).is_pending());
    }
    let before = clock.1.get();
    for buffer in 1..100 {
        session.retire(NODE, Key::new(1, 1), Addr::new(buffer * 64));
        clock.0.set(clock.0.get() + MS);
        assert!(driver.as_mut().poll(&mut cx).is_pending());
    }
    assert_eq!(line.node.borrow().1.retired, 99);
    assert!(clock.1.get() <= before + 1, "{} sleeps for one timer", clock.1.get() - before);
}
