//! Batches of calls to nodes that answer at once, as FaSST measures its calls (OSDI'16, section 4.5).
//!
//! Each operation sends a batch of requests, each to a random node, and waits for all responses.
//!
//! Invariant: each response is checked: its length, the number of its request, and its last byte.

use std::fmt;

use farside_remote::Fabric;
use farside_remote::draws::Draws;
use farside_systems::rpc::echo::{Asking, Echo, EchoError};
use rand_core::Rng;

use crate::driver::{self, Fault, Perform, Trouble, Work};
use crate::workload::Random;

/// A run of calls.
pub type Run = driver::Run<CallWork>;

/// Batches of calls.
pub struct CallWork {
    asking: Asking,
}

/// Parameters of a run of calls.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The requests of an operation.
    pub asking: Asking,
    /// Number of tasks of all threads together.
    pub tasks: u32,
    /// Number of operations for each sampled latency, at least 1.
    pub sampled: u64,
    /// Seed of all random draws.
    pub seed: u64,
}

impl Plan {
    /// Creates the run of this plan.
    ///
    /// # Errors
    /// The number of tasks is 0.
    pub fn run(self) -> Result<Run, String> {
        let Plan { asking, tasks, sampled, seed } = self;
        Run::new(CallWork { asking }, tasks, sampled, seed)
    }
}

impl Work for CallWork {
    const KINDS: &'static [&'static str] = &["batch"];
    /// Seed of the choice of nodes.
    type Drawn = u64;
    type Source = Random;
    type Task = ();
    type Trouble = CallTrouble;

    fn source(&self, random: Random) -> Random {
        random
    }

    #[inline]
    fn draw(source: &mut Random) -> u64 {
        source.next_u64()
    }

    #[inline]
    fn kind(_drawn: u64) -> usize {
        0
    }

    fn task(&self, _number: u32) {}

    fn records(&self) -> u64 {
        0 // A node answers requests without any.
    }
}

impl<F: Fabric> Perform<Echo<F>> for CallWork {
    async fn load(&self, _echo: &mut Echo<F>, record: u64, _task: &mut ()) -> Result<(), CallTrouble> {
        unreachable!("there is no record {record}")
    }

    #[inline]
    async fn perform(&self, echo: &mut Echo<F>, drawn: u64, _task: &mut ()) -> Result<(), CallTrouble> {
        let mut draws = Draws(drawn);
        Ok(echo.ask(self.asking, || draws.next()).await?)
    }
}

/// Error or violation of an operation.
#[derive(Debug)]
pub struct CallTrouble(EchoError);

impl Trouble for CallTrouble {
    fn fault(&self) -> Fault {
        match &self.0 {
            EchoError::Fabric(error) => Fault::of(error),
            EchoError::Refused(..) | EchoError::TooLong => Fault::Failed,
            EchoError::Wrong(_) => Fault::Violated,
        }
    }
}

impl fmt::Display for CallTrouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<EchoError> for CallTrouble {
    fn from(error: EchoError) -> CallTrouble {
        CallTrouble(error)
    }
}
