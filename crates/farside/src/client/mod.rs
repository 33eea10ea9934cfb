//! A client for ordinary programs: any thread or task may use it, and a thread of its own runs the operations.
//!
//! Invariant: an operation that was handed over is answered, even if the thread ends: then by [`Error::Closed`].

mod pending;

pub use pending::Pending;

use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::pool::Pool;
use farside_fabrics::executor::{Core, block_on};
use farside_remote::NodeId;
use farside_systems::kv::prism_kv::{Conflict, PrismKv};
use farside_systems::kv::{KvError, Version};
use pending::{Promise, promise};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// A value with its version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    /// Its bytes.
    pub value: Vec<u8>,
    /// Which install this was: for [`Client::compare_and_put`].
    pub version: Version,
}

/// Operations under way at once; more wait in line.
const TASKS: usize = 32;

/// A client of one store. Cheap to clone; the last clone to go ends its thread, once all that was asked is done.
#[derive(Clone)]
pub struct Client {
    queue: Arc<Handle>,
}

impl Client {
    pub(crate) fn start(pool: Pool, name: &str) -> Result<Client, Error> {
        let queue = Arc::new(Queue::default());
        let theirs = Arc::clone(&queue);
        let name = name.to_owned();
        let (ready, opened) = mpsc::channel();
        std::thread::Builder::new()
            .name("farside-client".into())
            .spawn(move || run(&pool, &name, &theirs, &ready))
            .map_err(Error::Thread)?;
        opened.recv().unwrap_or(Err(Error::Closed))?;
        Ok(Client { queue: Arc::new(Handle(queue)) })
    }

    /// The value of `key`.
    pub fn get(&self, key: impl Into<Vec<u8>>) -> Pending<Option<Value>> {
        let key = key.into();
        self.ask(|done| Request::Get { key, done })
    }

    /// Gives `key` a value.
    pub fn put(&self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Pending<()> {
        let (key, value) = (key.into(), value.into());
        self.ask(|done| Request::Put { key, value, done })
    }

    /// Takes the value of `key` away; answers whether it had one.
    pub fn delete(&self, key: impl Into<Vec<u8>>) -> Pending<bool> {
        let key = key.into();
        self.ask(|done| Request::Delete { key, done })
    }

    /// Gives `key` a value if it has none; answers whether it did.
    pub fn put_if_absent(&self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Pending<bool> {
        let (key, value) = (key.into(), value.into());
        self.ask(|done| Request::PutIfAbsent { key, value, done })
    }

    /// Gives `key` another value if it still has the version that a [`Client::get`] answered; answers the new one.
    pub fn compare_and_put(
        &self,
        key: impl Into<Vec<u8>>,
        expected: Version,
        value: impl Into<Vec<u8>>,
    ) -> Pending<Result<Version, Conflict>> {
        let (key, value) = (key.into(), value.into());
        self.ask(|done| Request::CompareAndPut { key, expected, value, done })
    }

    fn ask<T>(&self, request: impl FnOnce(Promise<T>) -> Request) -> Pending<T> {
        let (done, pending) = promise();
        self.queue.0.push(request(done));
        pending
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}

/// What clones share: when the last goes, the queue closes.
struct Handle(Arc<Queue>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.close();
    }
}

enum Request {
    Get {
        key: Vec<u8>,
        done: Promise<Option<Value>>,
    },
    Put {
        key: Vec<u8>,
        value: Vec<u8>,
        done: Promise<()>,
    },
    Delete {
        key: Vec<u8>,
        done: Promise<bool>,
    },
    PutIfAbsent {
        key: Vec<u8>,
        value: Vec<u8>,
        done: Promise<bool>,
    },
    CompareAndPut {
        key: Vec<u8>,
        expected: Version,
        value: Vec<u8>,
        done: Promise<Result<Version, Conflict>>,
    },
}

/// What was asked and not yet begun.
#[derive(Default)]
struct Queue {
    inner: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    requests: VecDeque<Request>,
    /// Tasks with nothing to do.
    idle: Vec<Waker>,
    closed: bool,
}

impl Queue {
    fn inner(&self) -> MutexGuard<'_, Waiting> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request to a queue that is closed is dropped, which answers it.
    fn push(&self, request: Request) {
        let mut inner = self.inner();
        if !inner.closed {
            inner.requests.push_back(request);
            let idle = inner.idle.pop();
            drop(inner);
            idle.into_iter().for_each(Waker::wake);
        }
    }

    fn close(&self) {
        let mut inner = self.inner();
        inner.closed = true;
        let idle = std::mem::take(&mut inner.idle);
        drop(inner);
        idle.into_iter().for_each(Waker::wake);
    }

    /// The next request; nothing once the queue is closed and empty.
    async fn pop(&self) -> Option<Request> {
        std::future::poll_fn(|cx| {
            let mut inner = self.inner();
            if let Some(request) = inner.requests.pop_front() {
                return Poll::Ready(Some(request));
            }
            if inner.closed {
                return Poll::Ready(None);
            }
            inner.idle.push(cx.waker().clone());
            Poll::Pending
        })
        .await
    }
}

/// Ends the queue whichever way the thread ends, so that nobody waits for it.
struct CloseAtEnd<'a>(&'a Queue);

impl Drop for CloseAtEnd<'_> {
    fn drop(&mut self) {
        self.0.close();
        self.0.inner().requests.clear();
    }
}

/// The client's thread: a core whose tasks take requests as they come.
fn run(pool: &Pool, name: &str, queue: &Queue, ready: &mpsc::Sender<Result<(), Error>>) {
    let _closes = CloseAtEnd(queue);
    let open = || -> Result<_, Error> {
        let endpoint = Rc::new(pool.endpoint()?);
        let mut kvs = Vec::with_capacity(TASKS);
        for _ in 0..TASKS {
            kvs.push(block_on(&endpoint, PrismKv::open(Rc::clone(&endpoint), NodeId(0), name))?);
        }
        Ok((endpoint, kvs))
    };
    let (endpoint, kvs) = match open() {
        Ok(opened) => opened,
        Err(error) => return drop(ready.send(Err(error))),
    };
    if ready.send(Ok(())).is_err() {
        return;
    }
    let mut core = Core::new(&endpoint);
    for mut kv in kvs {
        core.spawn(async move {
            while let Some(request) = queue.pop().await {
                serve(&mut kv, request).await;
            }
        });
    }
    core.run();
}

async fn serve(kv: &mut PrismKv<Rc<Endpoint>>, request: Request) {
    match request {
        Request::Get { key, done } => {
            let got = kv.get(&key).await;
            let owned = |item: farside_systems::kv::Item<'_>| Value {
                value: item.value.to_vec(),
                version: item.version,
            };
            done.keep(got.map(|item| item.map(owned)));
        }
        Request::Put { key, value, done } => done.keep(kv.put(&key, &value).await),
        Request::Delete { key, done } => done.keep(kv.delete(&key).await),
        Request::PutIfAbsent { key, value, done } => done.keep(kv.put_if_absent(&key, &value).await),
        Request::CompareAndPut { key, expected, value, done } => {
            done.keep(kv.compare_and_put(&key, expected, &value).await);
        }
    }
}

impl<T> Promise<T> {
    fn keep(self, result: Result<T, KvError>) {
        self.fulfil(result.map_err(Error::Kv));
    }
}
