//! Memory of a device: copies, what is used again, threads, and what happens when there is none left.

mod common;

use common::{gpu, is_real, turn};
use rankgrad_cuda::{Array, Error, Gpu};
use rankgrad_cuda_fake as fake;

#[test]
fn elements_come_back_as_they_went() {
    let _turn = turn();
    let gpu = gpu();
    for n in [0, 1, 3, 4, 1000, (4 << 20) / 8, (4 << 20) / 8 + 1, 2_000_003] {
        let elements: Vec<f64> = (0..n).map(|i| i as f64 * 0.5).collect();
        let array = Array::from_slice(&gpu, &elements).unwrap();
        assert_eq!(array.to_vec().unwrap(), elements, "{n}");
        let copy = array.deep_copy().unwrap();
        assert!(!copy.is_same(&array) && array.is_unique());
        assert_eq!(copy.to_vec().unwrap(), elements, "{n}");
    }
    let many: Vec<Vec<i64>> = (0..50).map(|n| (0..n * 7).collect()).collect();
    let slices: Vec<&[i64]> = many.iter().map(Vec::as_slice).collect();
    let arrays = Array::from_slices(&gpu, &slices).unwrap();
    for (array, elements) in arrays.iter().zip(&many) {
        assert_eq!(&array.to_vec().unwrap(), elements);
    }
}

#[test]
fn arrays_are_filled() {
    let _turn = turn();
    let gpu = gpu();
    for n in [0, 1, 255, 70_000] {
        assert_eq!(Array::full(&gpu, n, 1.5_f32).unwrap().to_vec().unwrap(), vec![1.5; n]);
        assert_eq!(Array::full(&gpu, n, 0_i64).unwrap().to_vec().unwrap(), vec![0; n]);
        assert_eq!(Array::full(&gpu, n, 1_u8).unwrap().to_vec().unwrap(), vec![1; n]);
        let bits: Vec<u64> = Array::full(&gpu, n, -0.0_f64)
            .unwrap()
            .to_vec()
            .unwrap()
            .into_iter()
            .map(f64::to_bits)
            .collect();
        assert_eq!(bits, vec![(-0.0_f64).to_bits(); n]);
    }
    for values in [[0.0, 0.0], [2.0, 2.0], [0.0, 3.0]] {
        let arrays = Array::filled(&gpu, &[(100, values[0]), (7, values[1])]).unwrap();
        assert_eq!(arrays[0].to_vec().unwrap(), vec![values[0]; 100]);
        assert_eq!(arrays[1].to_vec().unwrap(), vec![values[1]; 7]);
    }
}

#[test]
fn freed_memory_is_used_again_by_the_next_of_its_size() {
    let _turn = turn();
    let gpu = gpu();
    let first = Array::from_slice(&gpu, &[1.0_f32; 1000]).unwrap();
    let free = gpu.free_memory().unwrap();
    drop(first);
    // The copy of the second is after all that was asked of the first.
    let second = Array::from_slice(&gpu, &[2.0_f32; 1000]).unwrap();
    assert_eq!(gpu.free_memory().unwrap(), free);
    assert_eq!(second.to_vec().unwrap(), [2.0; 1000]);
}

#[test]
fn a_context_is_bound_to_each_thread_that_uses_it() {
    let _turn = turn();
    let array = Array::from_slice(&gpu(), &[3.0_f64; 10]).unwrap();
    let sum: f64 = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| array.to_vec().unwrap().iter().sum::<f64>()))
            .collect();
        readers.into_iter().map(|reader| reader.join().unwrap()).sum()
    });
    assert_eq!(sum, 120.0);
    // The last of it is dropped where nothing was bound.
    std::thread::spawn(move || drop(array)).join().unwrap();
    if !is_real() {
        assert_eq!(fake::counts(), fake::Counts::default());
    }
}

#[test]
fn a_device_is_closed_with_the_last_that_uses_it() {
    let _turn = turn();
    if is_real() {
        println!("skipped: only the fake driver counts");
        return;
    }
    let gpu = gpu();
    let array = Array::from_slice(&gpu, &[1.0_f32; 10]).unwrap();
    drop(gpu);
    assert_eq!(fake::counts().contexts, 1);
    assert_eq!(array.to_vec().unwrap(), [1.0; 10]);
    drop(array);
    assert_eq!(fake::counts(), fake::Counts::default());
}

#[test]
fn memory_that_is_out_says_what_was_asked_and_what_is_free() {
    let _turn = turn();
    let gpu = gpu();
    let (total, most) = (gpu.total_memory(), 1 << 50);
    match Array::<u8>::new(&gpu, most).unwrap_err() {
        Error::OutOfMemory {
            ordinal: 0,
            asked,
            free,
            total: all,
            code: 2,
        } => {
            assert!(asked == most && free <= total && all == total);
        }
        other => panic!("{other}"),
    }
    let error = Array::<u8>::new(&gpu, most).unwrap_err().to_string();
    assert!(
        error.starts_with("CUDA device 0 has no memory for 1125899906842624 bytes: "),
        "{error}"
    );
    assert!(Array::<f64>::new(&gpu, usize::MAX / 4).is_err());
    if !is_real() {
        // What is cached is given back before memory is out.
        drop(Array::<u8>::new(&gpu, total / 2).unwrap());
        drop(Array::<u8>::new(&gpu, total / 2 + (1 << 20)).unwrap());
    }
}

#[test]
fn devices_are_numbered() {
    let _turn = turn();
    let count = rankgrad_cuda::devices().unwrap();
    let error = Gpu::open(count).unwrap_err();
    assert_eq!(error, Error::NoSuchDevice { ordinal: count, count });
    assert_eq!(Gpu::pci_address(0).unwrap().len(), "0000:3b:00.0".len());
    if count > 1 {
        let (one, two) = (gpu(), Gpu::open(1).unwrap());
        let arrays = [&one, &two].map(|gpu| Array::from_slice(gpu, &[f64::from(gpu.ordinal()); 5]).unwrap());
        assert_eq!(arrays.map(|array| array.to_vec().unwrap()), [vec![0.0; 5], vec![1.0; 5]]);
    }
}

#[test]
fn raw_codes_are_told() {
    let _turn = turn();
    if is_real() {
        println!("skipped: only the fake driver fails on purpose");
        return;
    }
    for (function, code, text) in [
        ("cuDevicePrimaryCtxRetain", 46, "exclusive mode"),
        ("cuDevicePrimaryCtxRetain", 805, "MPS"),
        ("cuModuleLoadDataEx", 222, "refuses the kernels"),
        ("cuModuleLoadDataEx", 218, "refuses the kernels"),
        ("cuInit", 999, "code 999"),
    ] {
        fake::fail(function, 0, code);
        let error = Gpu::open(0).unwrap_err().to_string();
        assert!(
            error.contains(text) && error.contains(&format!("code {code}")),
            "{function}: {error}"
        );
        assert_eq!(fake::counts(), fake::Counts::default(), "{function}");
    }
}

#[test]
fn elements_of_others_come_in_the_order_of_their_stream() {
    let _turn = turn();
    let gpu = gpu();
    // What another part of the program has on the device, filled on its stream.
    let foreign = Array::from_slice(&gpu, &[1.5_f64; 100]).unwrap();
    let (pointer, stream) = foreign.as_device_pointer().unwrap();
    // SAFETY: the elements are there, and so is the stream, as long as `foreign` lives.
    let copy = unsafe { Array::<f64>::copy_from_device(&gpu, pointer, 100, stream) }.unwrap();
    assert_eq!(copy.to_vec().unwrap(), [1.5; 100]);
    // SAFETY: as above, for no elements.
    assert!(unsafe { Array::<f64>::copy_from_device(&gpu, 0, 0, stream) }.unwrap().is_empty());
}
