//! Services at a running node: calls of one store that run in parallel, and steps at a time for which they asked.

use farside_fabrics::local::LocalNode;
use farside_fabrics::memory::{Mapping, Pages};
use farside_node::host::{Host, Options};
use farside_remote::control::{Answer, Ask};
use farside_remote::service::{Call, Context, Extent, Kind, Locks, Plan, Service, Tick, Work, address};
use farside_remote::{Key, Memory};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Longest wait of a test. No correct run reaches it.
const DEADLINE: Duration = Duration::from_secs(20);

/// The calls that run, and what was seen.
#[derive(Default)]
struct Seen {
    inside: Mutex<u64>,
    entered: Condvar,
    /// Number of steps of background work, and the time of the last one in nanoseconds.
    steps: AtomicU64,
    stepped_at: AtomicU64,
}

/// A kind whose calls meet: a call returns once as many calls run as its request says. The first byte of a request is
/// the number of its lock, the second byte the number of calls.
#[derive(Clone, Default)]
struct Meeting(Arc<Seen>);

impl<M: Memory> Kind<M> for Meeting {
    fn name(&self) -> &'static str {
        "meeting"
    }

    fn plan(&self, _parameters: &str, _quota: u64, _entropy: u64) -> Result<Plan, String> {
        Ok(Plan { table_len: 1 << 16, ..Plan::default() })
    }

    fn serve(&self, _parameters: &str, _table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Ok(Box::new(self.clone()))
    }
}

impl<M: Memory> Service<M> for Meeting {
    fn call(
        &self,
        _context: Context<'_, M>,
        call: Call<'_>,
        answer: &mut Vec<u8>,
    ) -> Result<Result<(), String>, M::Wait> {
        let wanted = u64::from(call.request[1]);
        let mut inside = self.0.inside.lock().expect("no call panics");
        *inside += 1;
        answer.push(*inside as u8);
        self.0.entered.notify_all();
        if wanted > 1 {
            let met = self.0.entered.wait_timeout_while(inside, DEADLINE, |inside| *inside < wanted);
            let (guard, waited) = met.expect("no call panics");
            if waited.timed_out() {
                return Ok(Err(format!("{guard} calls run and not {wanted}")));
            }
        } else {
            *inside -= 1;
        }
        Ok(Ok(()))
    }

    fn locks(&self, work: Work<'_>) -> Locks {
        match work {
            Work::Call(request) => Locks::of(request[0].into()),
            Work::Finish(_) | Work::Live | Work::Tick => Locks::NONE,
        }
    }

    fn tick(&self, context: Context<'_, M>) -> Result<Tick, M::Wait> {
        self.0.steps.fetch_add(1, Ordering::Relaxed);
        let last = self.0.stepped_at.swap(context.now.as_nanos() as u64, Ordering::Relaxed);
        assert!(context.now.as_nanos() as u64 >= last, "the node's clock never decreases");
        Ok(Tick::At(context.now + Duration::from_micros(200)))
    }

    fn live(&self, _memory: &M, _cursor: u64, _found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        Ok(None)
    }
}

fn serve(kind: &Meeting) -> (Host, Key) {
    let memory = Mapping::create(16 << 20, Pages::Small).expect("memory");
    let host = Host::start(memory, vec![Box::new(kind.clone())], Options::default()).expect("it serves");
    let (name, kind, parameters) = ("s".into(), "meeting".into(), String::new());
    let created = host.ask(Ask::CreateStore { name, kind, parameters, quota: 4 << 20 }, DEADLINE);
    match created {
        Ok(Answer::Store(store)) => (host, store.extent().key),
        other => panic!("{other:?}"),
    }
}

fn call(host: &Host, key: Key, lock: u8, wanted: u8) -> Result<u8, String> {
    let session = host.open_session().expect("a slot is free");
    let (mut request, mut answer) = (Vec::new(), Vec::new());
    let service = address(key, &mut request);
    request.extend_from_slice(&[lock, wanted]);
    let called = host.call(session, service, &request, &mut answer).map_err(|error| error.to_string());
    host.close_session(session);
    called.map(|()| answer[0])
}

#[test]
fn calls_with_different_locks_run_at_the_same_time() {
    let (host, key) = serve(&Meeting::default());
    std::thread::scope(|scope| {
        let calls: Vec<_> = (0..3)
            .map(|lock| {
                scope.spawn({
                    let host = &host;
                    move || call(host, key, lock, 3)
                })
            })
            .collect();
        for one in calls {
            one.join().expect("no call panics").expect("all three met");
        }
    });
}

#[test]
fn calls_with_one_lock_run_one_after_another() {
    let (host, key) = serve(&Meeting::default());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let host = &host;
            scope.spawn(move || {
                for _ in 0..200 {
                    assert_eq!(call(host, key, 9, 1), Ok(1), "no other call runs");
                }
            });
        }
    });
}

#[test]
fn a_running_node_steps_a_service_at_the_times_for_which_it_asks() {
    let kind = Meeting::default();
    let (host, _) = serve(&kind);
    let began = std::time::Instant::now();
    // By its own checks alone, an idle node makes ten steps a second.
    while kind.0.steps.load(Ordering::Relaxed) < 500 {
        assert!(began.elapsed() < DEADLINE, "{} steps", kind.0.steps.load(Ordering::Relaxed));
        std::thread::park_timeout(Duration::from_millis(1));
    }
    drop(host);
}
