//! Conformance tests of all fabrics, whichever side runs the chains, and under any executor. One line of this file adds
//! a fabric to these tests.

#[macro_use]
mod suite;

conformance!(local, Local);
conformance!(shm, Shm);
conformance!(udp, Engine<Udp>);
conformance!(sealed_udp, Engine<SealedUdp>);
conformance!(tcp, Engine<Tcp>);
conformance!(tls, Engine<Tls>);
conformance!(ring, Engine<Rings>);
conformance!(far_local, Far<Local>);
conformance!(far_udp, Far<Engine<Udp>>);
conformance!(three_shm, Three<Shm>);
conformance!(three_udp, Three<Engine<Udp>>);
conformance!(three_tcp, Three<Engine<Tcp>>);
conformance!(three_rings, Three<Engine<Rings>>);
conformance!(mixed_at_shm, Mixed<0>);
conformance!(mixed_at_tcp, Mixed<1>);
conformance!(
    #[ignore = "takes an RDMA device: cargo xtask verbs"]
    verbs,
    Device
);
