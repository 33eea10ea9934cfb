//! Measures sessions alternately, each for [`TURN`], round after round. Other load on the machine then slows all
//! sessions alike, so that the ratio of two sessions within a round is meaningful.
//!
//! Invariant: all sessions use the same connection and the same client core. A session has operations in flight only
//! during its own interval.

use super::pace::Step;
use super::{Session, far};
use crate::cli::Failure;
use farside::parts::{AnyKv, Endpoint};
use farside_bench::kv::Thread;
use farside_fabrics::executor::{Core, TASKS_MAX};
use farside_fabrics::layer::delay::{Delay, Distance};
use farside_systems::with_kv;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Time for which each session runs in a round.
pub(in crate::cli) const TURN: Duration = Duration::from_millis(20);

type Far = Rc<Delay<Rc<Endpoint>>>;

/// A client core that alternately measures sessions on one node.
pub(in crate::cli) struct Rounds<'s> {
    fabric: Far,
    lanes: Vec<Lane<'s>>,
}

/// A session with its clients on the shared connection.
struct Lane<'s> {
    session: &'s Session,
    drawn: Thread,
    kvs: Vec<AnyKv<Far>>,
}

impl<'s> Rounds<'s> {
    /// Connects to the node of `sessions`, and opens `clients_max` clients for each session.
    ///
    /// # Errors
    /// The connection fails, or a store is gone.
    ///
    /// # Panics
    /// If `sessions` is empty, or `clients_max` exceeds [`TASKS_MAX`].
    pub(in crate::cli) fn open(
        sessions: &'s [Session],
        clients_max: u32,
        distance: Distance,
    ) -> Result<Rounds<'s>, Failure> {
        assert!(clients_max as usize <= TASKS_MAX, "a client is a task of one core");
        let endpoint = sessions.first().expect("there is at least one session").pool.endpoint_here()?;
        let fabric = Rc::new(far(&Rc::new(endpoint), distance));
        let lane = |session: &'s Session| {
            let kvs = (0..clients_max).map(|_| session.kv(&fabric)).collect::<Result<_, _>>()?;
            Ok::<_, Failure>(Lane { session, drawn: session.run.thread(0), kvs })
        };
        let lanes = sessions.iter().map(lane).collect::<Result<_, _>>()?;
        Ok(Rounds { fabric, lanes })
    }

    /// Measures all sessions in `rounds` rounds, with `clients` clients in a closed loop. Returns, for each round, the
    /// operations a second of each session.
    ///
    /// # Errors
    /// An operation failed, or returned a wrong value.
    pub(in crate::cli) fn measure(&mut self, clients: u32, rounds: u32) -> Result<Vec<Vec<f64>>, Failure> {
        let mut measured = Vec::new();
        // Round 0 is the warm-up.
        for round in 0..=rounds {
            let turn = |lane: &mut Lane<'_>| lane.turn(&self.fabric, clients);
            let rates = self.lanes.iter_mut().map(turn).collect::<Result<Vec<f64>, _>>()?;
            if round > 0 {
                measured.push(rates);
            }
        }
        Ok(measured)
    }
}

impl Lane<'_> {
    fn turn(&mut self, fabric: &Far, clients: u32) -> Result<f64, Failure> {
        let Lane { session: Session { run, .. }, drawn, kvs } = self;
        run.resume();
        let mut core = Core::new(fabric);
        let began = Instant::now();
        for (client, kv) in (0..clients).zip(kvs) {
            let drawn = &*drawn;
            core.spawn(async move {
                with_kv!(kv, kv => {
                    // Only the first client reads the clock, and stops all clients.
                    if client > 0 {
                        run.task(kv, drawn, client, u64::MAX).await;
                        return;
                    }
                    let mut step = Step::default();
                    while began.elapsed() < TURN && run.task(kv, drawn, client, step.next()).await {}
                    run.stop();
                });
            });
        }
        core.run();
        drop(core);
        let seconds = began.elapsed().as_secs_f64();
        let tally = drawn.take_tally();
        match tally.failures.first() {
            Some(wrong) => Err(Failure::Error(format!("the measurement failed: {wrong}"))),
            None => Ok(tally.operations() as f64 / seconds),
        }
    }
}
