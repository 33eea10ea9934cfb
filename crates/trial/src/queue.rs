//! The family of queues. Each store is one queue.

use crate::family::{Failure, FailureKind, Family, Seat};
use crate::flight::{Phase, Phases, Request, Tracked};
use crate::kv::{Sizes, unknown_bytes};
use crate::systems::System;
use crate::{Choice, Drawn, Scene, values};
use farside_remote::fabric::Ran;
use farside_remote::{FabricError, NodeId};
use farside_sim::fifo::Fifo;
use farside_sim::history::queue::{Ask, Outcome};
use farside_sim::random::Random;
use farside_systems::queue::{Queue as _, QueueError};
use farside_systems::registry::{self, AnyQueue, Registered};
use farside_systems::system::{Options, Sizing};

/// A queue system, with the options that a seed has drawn for the system.
pub(crate) struct Queue {
    system: &'static Registered,
    sizes: Sizes,
    /// Capacity of each queue, in values.
    slots: u64,
}

/// Key that the history uses for the only queue of a store.
const ONE: u64 = 0;

static PHASES: Phases = Phases {
    all: &[
        Phase::new("idle").rare(),
        Phase::new("look"),
        Phase::allocating("put"),
        Phase::new("take"),
        Phase::new("raise").rare(),
        Phase::new("catalog").rare(),
    ],
    of: |request, _| match request {
        Request::Call(..) => 5,
        Request::Chain(chain) => match (chain.allocates(), chain.atomics()) {
            (0, 0) => 1,
            (0, 1) => 4,
            (0, _) => 3,
            _ => 2,
        },
    },
};

impl Family for Queue {
    type Ask = Ask;
    type Client = AnyQueue<Tracked>;
    type Shared = ();
    type Checker = Fifo;

    fn drawn(system: System, drawn: &Drawn, random: &Random) -> Queue {
        Queue {
            system: registry::named(system.name()).expect("every queue system is registered"),
            sizes: Sizes::drawn(drawn, None, random),
            slots: 1 << random.below(5),
        }
    }

    fn options(&self) -> Vec<Choice> {
        let mut options = self.sizes.options();
        options.push(Choice::new("slots", self.slots, format!("slots {}", self.slots)));
        options
    }

    fn parameters(&self) -> String {
        (self.system.parameters)(&Sizing { items: Some(self.slots), ..Sizing::default() })
    }

    fn is_one_sided(&self) -> bool {
        true
    }

    fn phases(_system: System) -> &'static Phases {
        &PHASES
    }

    fn checker(&self) -> Fifo {
        Fifo { capacity: self.slots }
    }

    async fn open(
        &self,
        seat: Seat<'_, Queue>,
        node: NodeId,
        name: &str,
    ) -> Result<AnyQueue<Tracked>, Failure> {
        Ok(AnyQueue::open(seat.fabric(), node, name, &Options::default()).await?)
    }

    fn draw(&self, scene: &Scene, _client: &mut AnyQueue<Tracked>) -> (u64, Ask) {
        let is_put = scene.world.random().one_in(2);
        (ONE, if is_put { Ask::Put(self.sizes.value(scene)) } else { Ask::Take })
    }

    async fn perform(
        &self,
        _scene: &Scene,
        client: &mut AnyQueue<Tracked>,
        _who: u32,
        key: u64,
        ask: &Ask,
    ) -> Result<Outcome, Failure> {
        Ok(match ask {
            Ask::Put(value) if client.put(&values::bytes(*value)).await? => Outcome::Done,
            Ask::Put(_) => Outcome::Full,
            Ask::Take => match client.take().await? {
                Some(bytes) => Outcome::Taken(values::known(bytes).ok_or_else(|| unknown_bytes(key))?),
                None => Outcome::Empty,
            },
        })
    }

    fn read_all(&self, _scene: &Scene) -> Vec<(u64, Ask)> {
        vec![(ONE, Ask::Take); self.slots as usize + 1]
    }
}

impl From<QueueError> for Failure {
    fn from(error: QueueError) -> Failure {
        let (kind, message) = match &error {
            QueueError::OutOfMemory => (FailureKind::OutOfMemory, error.to_string()),
            QueueError::Fabric(FabricError::Deadline { .. }) => (FailureKind::Declined, error.to_string()),
            QueueError::Refused(status) => {
                (FailureKind::Refused, format!("a client was denied an access that it is allowed: {status}"))
            }
            QueueError::Damaged(what) => {
                (FailureKind::Wrong, format!("a client found the store damaged: {what}"))
            }
            _ => (FailureKind::Over, error.to_string()),
        };
        // A failed take is unknown even if it is known to have run: it may have taken a value, and that value is lost.
        let ran = if error.ran() == Ran::Yes { Ran::Unknown } else { error.ran() };
        Failure { ran, kind, message }
    }
}
